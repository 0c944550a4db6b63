#include "server/engine/intake.h"

#include "absl/strings/str_cat.h"

#include "config/base/check.h"
#include "server/engine/append_step.h"

namespace fp8kvd::engine {

void Intake::Take(Request* requests, int64_t now_ms) {
  while (requests != nullptr) {
    Request* const next = requests->book.next;
    ++context_.stats.requests_taken_total[static_cast<size_t>(requests->kind)];
    switch (requests->kind) {
      case Request::Kind::kDecode:
        TakeDecode(static_cast<DecodeRequest*>(requests), now_ms);
        break;
      case Request::Kind::kAppend:
        TakeAppend(static_cast<AppendRequest*>(requests), now_ms);
        break;
      case Request::Kind::kControl:
        TakeControl(static_cast<ControlRequest*>(requests), now_ms);
        break;
    }
    requests = next;
  }
}

absl::StatusOr<cache::SeqIndex> Intake::FindOf(const cache::SeqHandle& handle,
                                               const Request& request, int32_t model) const {
  absl::StatusOr<cache::SeqIndex> seq = context_.store.Find(handle, request.tenant);
  if (!seq.ok() || context_.store.Model(*seq) == model) return seq;
  const auto name_of = [this](int32_t m) -> const std::string& {
    return context_.models[m].geometry.name;
  };
  return absl::InvalidArgumentError(
      absl::StrCat("the sequence is of model ", name_of(context_.store.Model(*seq)),
                   ", the call names ", name_of(model), "; send it with its own model"));
}

void Intake::TakeDecode(DecodeRequest* request, int64_t now_ms) {
  const ModelGeometry& geometry = context_.models[request->model].geometry;
  FP8KVD_CHECK(request->layer >= 0 && request->layer < geometry.layers);
  if (!request->is_rest) ++context_.stats.models[request->model].decode_requests_total;
  request->launched = request->fenced = 0;
  request->batch_items = 0;
  for (DecodeItem& item : request->items) {
    item.stage = DecodeItem::Stage::kAnswered;
    const absl::StatusOr<cache::SeqIndex> seq = FindOf(item.handle, *request, request->model);
    if (seq.ok()) context_.store.Renew(*seq, now_ms);
    if (item.status.ok()) item.status = seq.status();
    if (!item.status.ok()) {
      ++context_.stats.items_failed_total;
      continue;
    }
    item.stage = DecodeItem::Stage::kWaiting;
    item.seq = *seq;
    context_.store.Hold(*seq);
    ++request->book.waiting;
  }
  if (request->book.waiting > 0) {
    batcher_->Add(request);
  } else {
    answers_->EndWaiting(request, request->status);
  }
}

void Intake::TakeAppend(AppendRequest* request, int64_t now_ms) {
  const ModelGeometry& geometry = context_.models[request->model].geometry;
  FP8KVD_CHECK(request->layer >= 0 && request->layers_count >= 1 &&
               request->layer + request->layers_count <= geometry.layers);
  request->is_held = false;
  if (request->n < 1) {
    answers_->EndWaiting(
        request, absl::InvalidArgumentError(absl::StrCat("n is ", request->n,
                                                         ", at least 1 is allowed; with skip_to "
                                                         "too, send the tokens that follow")));
    return;
  }
  FP8KVD_CHECK(request->slice_tokens >= 1);
  FP8KVD_CHECK(static_cast<int64_t>(request->slice_digests.size()) == AppendPieces(*request));
  FP8KVD_CHECK(static_cast<int32_t>(request->seq_lens.size()) == request->layers_count);
  const absl::StatusOr<cache::SeqIndex> seq = FindOf(request->handle, *request, request->model);
  if (!seq.ok()) {
    answers_->EndWaiting(request, seq.status());
    return;
  }
  context_.store.Renew(*seq, now_ms);
  context_.store.Hold(*seq);
  request->seq = *seq;
  request->is_held = true;
  request->pieces_done = request->pieces_coming = 0;
  request->book.waiting = AppendPieces(*request);
  batcher_->Add(request);
}

void Intake::TakeControl(ControlRequest* request, int64_t now_ms) {
  request->held.clear();
  for (const cache::SeqHandle& handle : request->handles) {
    const absl::StatusOr<cache::SeqIndex> seq = context_.store.Find(handle, request->tenant);
    if (!seq.ok()) continue;
    context_.store.Renew(*seq, now_ms);
    context_.store.Hold(*seq);
    request->held.push_back(*seq);
  }
  batcher_->Add(request);
}

}  // namespace fp8kvd::engine
