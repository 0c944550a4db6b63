#include "server/engine/control_step.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "config/base/limits.h"

namespace fp8kvd::engine {
namespace {

// Places of the store that a list goes over in one turn; what comes then is for the next page. The
// store's own bound is of one model.
constexpr int64_t kListPlacesMax = 65536;

// list_after: a model in the upper half, the store's cursor within it in the lower.
constexpr int32_t kCursorBits = 32;

absl::Status CheckCount(int32_t count) {
  if (count >= 1 && count <= kItemsMax) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("count is ", count, ", 1 .. ", kItemsMax,
                                                 " is allowed; make the others in another call"));
}

}  // namespace

absl::Status ControlStep::Run(ControlRequest* request, int64_t now_ms) {
  switch (request->op) {
    case ControlRequest::Op::kCreate:
      request->status = Create(request, now_ms);
      break;
    case ControlRequest::Op::kFork:
      return Fork(request, now_ms);
    case ControlRequest::Op::kList:
      List(request, now_ms);
      break;
    case ControlRequest::Op::kTruncate:
    case ControlRequest::Op::kFree:
    case ControlRequest::Op::kRenew:
    case ControlRequest::Op::kStat:
      ForEachHandle(request, now_ms);
      break;
  }
  if (absl::IsResourceExhausted(request->status)) request->retry_after_ms = kRoomRetryMs;
  return absl::OkStatus();
}

absl::StatusOr<int64_t> ControlStep::TtlOf(const ControlRequest& request,
                                           int64_t ttl_ms_default) const {
  if (request.ttl_ms == 0) return ttl_ms_default;
  if (request.ttl_ms < 0 || request.ttl_ms > context_.cache_options.lease_ttl_ms_max) {
    return absl::InvalidArgumentError(absl::StrCat("ttl_ms is ", request.ttl_ms, ", at most ",
                                                   context_.cache_options.lease_ttl_ms_max,
                                                   " is allowed; renew the lease instead"));
  }
  return request.ttl_ms;
}

absl::Status ControlStep::Create(ControlRequest* request, int64_t now_ms) {
  if (request->model < 0 || request->model >= static_cast<int32_t>(context_.models.size())) {
    return absl::NotFoundError(absl::StrCat("no model ", request->model, ", there are ",
                                            context_.models.size(), "; ask GetServerInfo"));
  }
  if (absl::Status status = CheckCount(request->count); !status.ok()) return status;
  const absl::StatusOr<int64_t> ttl_ms = TtlOf(*request, context_.cache_options.lease_ttl_ms);
  if (!ttl_ms.ok()) return ttl_ms.status();
  request->ttl_ms = *ttl_ms;
  std::vector<cache::SeqHandle> handles(request->count);
  absl::Status status =
      context_.store.Create(cache::CreateArgs{.model = request->model,
                                              .expected_tokens = request->expected_tokens,
                                              .ttl_ms = *ttl_ms,
                                              .tenant = request->tenant},
                            now_ms, absl::MakeSpan(handles));
  if (status.ok()) request->handles = std::move(handles);
  return status;
}

absl::Status ControlStep::Fork(ControlRequest* request, int64_t now_ms) {
  const auto make = [&]() -> absl::Status {
    if (request->handles.size() != 1) {
      return absl::InvalidArgumentError("a fork has one parent; name it");
    }
    const absl::StatusOr<cache::SeqIndex> parent =
        context_.store.Find(request->handles[0], request->tenant);
    if (!parent.ok()) return parent.status();
    if (absl::Status status = CheckCount(request->count); !status.ok()) return status;
    const absl::StatusOr<int64_t> ttl_ms =
        TtlOf(*request, context_.store.Stat(*parent, now_ms).ttl_ms);
    if (!ttl_ms.ok()) return ttl_ms.status();
    std::vector<cache::SeqHandle> children(request->count);
    absl::Status status = context_.store.Fork(
        *parent, cache::ForkArgs{.expected_tokens = request->expected_tokens, .ttl_ms = *ttl_ms},
        now_ms, absl::MakeSpan(children));
    if (!status.ok()) return status;
    request->ttl_ms = *ttl_ms;
    request->handles = std::move(children);
    return absl::OkStatus();
  };
  request->status = make();
  if (absl::IsResourceExhausted(request->status)) request->retry_after_ms = kRoomRetryMs;
  if (!request->status.ok()) return absl::OkStatus();
  context_.stats.forks_total += request->handles.size();
  for (const cache::SeqHandle& child : request->handles) {
    if (absl::Status status = FillTables(*context_.store.Find(child, request->tenant));
        !status.ok())
      return status;
  }
  return absl::OkStatus();
}

absl::Status ControlStep::FillTables(cache::SeqIndex seq) {
  std::vector<kernels::TableEdit> edits;
  const ModelSetup& model = context_.models[context_.store.Model(seq)];
  for (int32_t group = 0; group < static_cast<int32_t>(model.geometry.groups.size()); ++group) {
    const cache::BlockTable& table = context_.store.Table(seq, group);
    int32_t* at = context_.pages.BlockTable(seq, group) + table.first_page();
    for (const cache::PageId page_id : table.pages()) {
      edits.push_back(kernels::TableEdit{.at = at++, .page = static_cast<int32_t>(page_id)});
    }
  }
  return edits.empty() ? absl::OkStatus() : context_.backend.UpdateTables(edits);
}

void ControlStep::ForEachHandle(ControlRequest* request, int64_t now_ms) {
  request->item_status.assign(request->handles.size(), absl::OkStatus());
  if (request->op == ControlRequest::Op::kStat) request->infos.resize(request->handles.size());
  if (request->op == ControlRequest::Op::kTruncate &&
      request->seq_lens.size() != request->handles.size()) {
    request->status = absl::InvalidArgumentError(
        absl::StrCat(request->seq_lens.size(), " seq_lens for ", request->handles.size(),
                     " handles; send one for each"));
    return;
  }
  for (size_t i = 0; i < request->handles.size(); ++i) {
    const absl::StatusOr<cache::SeqIndex> seq =
        context_.store.Find(request->handles[i], request->tenant);
    request->item_status[i] = seq.ok() ? RunOne(request, i, *seq, now_ms) : seq.status();
    if (absl::IsResourceExhausted(request->item_status[i])) request->retry_after_ms = kRoomRetryMs;
    if (!request->item_status[i].ok()) ++context_.stats.items_failed_total;
  }
}

absl::Status ControlStep::RunOne(ControlRequest* request, size_t i, cache::SeqIndex seq,
                                 int64_t now_ms) {
  switch (request->op) {
    case ControlRequest::Op::kTruncate:
      return context_.store.Truncate(seq, request->seq_lens[i]);
    case ControlRequest::Op::kFree:
      context_.store.Free(seq);
      return absl::OkStatus();
    case ControlRequest::Op::kStat:
      request->infos[i] = InfoOf(request->handles[i], seq, now_ms);
      return absl::OkStatus();
    default:  // kRenew: every request renews what it names when it is taken
      return absl::OkStatus();
  }
}

SequenceInfo ControlStep::InfoOf(const cache::SeqHandle& handle, cache::SeqIndex seq,
                                 int64_t now_ms) const {
  cache::SeqStat stat = context_.store.Stat(seq, now_ms);
  SequenceInfo info;
  info.handle = handle;
  info.model = stat.model;
  info.seq_lens = std::move(stat.seq_lens);
  info.pages = stat.pages_unique + stat.pages_shared;
  info.pages_shared = stat.pages_shared;
  const int32_t groups = static_cast<int32_t>(context_.models[stat.model].geometry.groups.size());
  for (int32_t group = 0; group < groups; ++group) {
    info.bytes += static_cast<int64_t>(context_.store.Table(seq, group).pages().size()) *
                  context_.pages.page_stride(stat.model, group);
  }
  info.expected_tokens = stat.expected_tokens;
  info.ttl_ms = stat.ttl_ms;
  info.ttl_left_ms = stat.lease_left_ms;
  return info;
}

void ControlStep::List(ControlRequest* request, int64_t now_ms) {
  const int32_t models = static_cast<int32_t>(context_.models.size());
  const uint32_t cursor_end = static_cast<uint32_t>(context_.cache_options.seqs_max);
  int64_t model = std::max(request->model, 0);
  uint32_t cursor = 0;
  if (request->list_after != 0) {
    model = static_cast<int64_t>(request->list_after >> kCursorBits);
    cursor = static_cast<uint32_t>(request->list_after);
  }
  if (model >= models || cursor > cursor_end || (request->model >= 0 && model != request->model)) {
    request->status = absl::InvalidArgumentError(
        "the page token is not one that this server gave for this model; start without one");
    return;
  }
  const size_t count =
      static_cast<size_t>(request->count < 1 ? kItemsMax : std::min(request->count, kItemsMax));
  std::vector<cache::SeqHandle> handles(count);
  for (int64_t places = 0; request->infos.size() < count && places < kListPlacesMax;) {
    if (cursor >= cursor_end) {
      if (request->model >= 0 || model + 1 >= models) break;
      ++model;
      cursor = 0;
    }
    const uint32_t begin = cursor;
    const int32_t found =
        context_.store.List(static_cast<int32_t>(model), request->tenant, &cursor,
                            absl::MakeSpan(handles).subspan(0, count - request->infos.size()));
    places += cursor - begin;
    for (int32_t i = 0; i < found; ++i) {
      request->infos.push_back(
          InfoOf(handles[i], *context_.store.Find(handles[i], request->tenant), now_ms));
    }
  }
  const bool is_last = cursor >= cursor_end && (request->model >= 0 || model + 1 >= models);
  request->list_next = is_last ? 0 : static_cast<uint64_t>(model) << kCursorBits | cursor;
}

}  // namespace fp8kvd::engine
