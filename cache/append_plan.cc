#include "cache/append_plan.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"

#include "cache/seq_store.h"
#include "config/base/check.h"

namespace fp8kvd::cache {
namespace {

std::string Asked(const AppendArgs& args) {
  return absl::StrCat("append of ", args.n, " tokens at ", args.pos, " in layer ", args.layer);
}

absl::Status CheckArgs(const AppendArgs& args) {
  if (args.n < 1) {
    return absl::InvalidArgumentError(absl::StrCat(Asked(args), ": bring at least one token"));
  }
  if (args.pos < 0) {
    return absl::InvalidArgumentError(absl::StrCat(Asked(args), ": positions begin at 0"));
  }
  if (args.skip_to < 0 || args.skip_to > args.pos) {
    return absl::InvalidArgumentError(
        absl::StrCat(Asked(args), ": skip_to is ", args.skip_to, "; it may be 0 to ", args.pos));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<AppendVerdict> JudgeAppend(const AppendArgs& args, int64_t seq_len,
                                          const ReplayWindow& replay) {
  absl::Status status = CheckArgs(args);
  if (!status.ok()) return status;
  if (args.pos == std::max(seq_len, args.skip_to)) return AppendVerdict::kCommit;
  if (args.pos > seq_len || args.pos + args.n > seq_len) {
    return absl::OutOfRangeError(
        absl::StrCat(Asked(args), ": the layer's seq_len is ", seq_len, "; append from there"));
  }
  const std::optional<uint64_t> digest = replay.Find(args.pos, args.n);
  if (!digest.has_value()) {
    return absl::FailedPreconditionError(absl::StrCat(
        Asked(args), ": the layer's seq_len is ", seq_len, " and this is none of its latest ",
        replay.size(), " appends; append from seq_len, or truncate first"));
  }
  if (*digest != args.digest) {
    return absl::AlreadyExistsError(absl::StrCat(
        Asked(args), ": other bytes are committed there; truncate to ", args.pos, " first"));
  }
  return AppendVerdict::kReplay;
}

absl::Status SeqStore::CheckSkip(Place place, const Seq& seq, const AppendArgs& args) const {
  const int32_t window = Shape(seq, place).window;
  if (args.skip_to > 0 && window == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        Asked(args), ": skip_to is ", args.skip_to,
        ", but the layer has no window, so later queries see every token; send them all"));
  }
  if (args.pos > options_.seq_len_max - args.n) {
    return absl::InvalidArgumentError(absl::StrCat(
        Asked(args), ": a sequence may hold ", options_.seq_len_max, " tokens; start another one"));
  }
  return absl::OkStatus();
}

absl::Status SeqStore::CheckRunAhead(Place place, const Seq& seq, const AppendArgs& args) const {
  const BlockTable::Shape& shape = Shape(seq, place);
  if (shape.window == 0) return absl::OkStatus();
  const SeqGroup& group = seq.groups[static_cast<size_t>(place.group)];
  const int64_t slowest_len = group.seq_len_min;
  const int64_t ahead_max = int64_t{shape.window} + shape.reclaim_slack_tokens;
  if (args.pos + args.n <= std::max(slowest_len, args.skip_to) + ahead_max) {
    return absl::OkStatus();
  }
  const auto slowest = std::find(group.seq_lens.begin(), group.seq_lens.end(), slowest_len);
  const auto& layers = options_.models[static_cast<size_t>(seq.model)]
                           .groups[static_cast<size_t>(place.group)]
                           .layers;
  const int32_t layer = layers[static_cast<size_t>(slowest - group.seq_lens.begin())];
  return absl::FailedPreconditionError(absl::StrCat(
      Asked(args), ": layer ", layer, " of the same group stands at ", slowest_len,
      ", and no layer may get more than ", ahead_max,
      " tokens (window + slack) ahead; append to layer ", layer, " first, or fewer tokens"));
}

// Fills edits_ and copies_, and takes the pages that they name.
absl::Status SeqStore::TakePages(const Seq& seq, int32_t group, const AppendArgs& args) {
  const BlockTable& table = seq.groups[static_cast<size_t>(group)].table;
  PagePool& pool = MutablePool(seq.model, group);
  const TenantPages& pages = PagesOfTenant(seq.model, group, seq.tenant);
  edits_.clear();
  copies_.clear();
  page_ids_.clear();
  pages_recycled_ = 0;
  const int64_t first_page = std::max(table.first_page(), args.skip_to / options_.page_tokens);
  int64_t unclaimed = 0;  // pages that no reservation pays for
  const int64_t last_page = (args.pos + args.n - 1) / options_.page_tokens;
  for (int64_t page_no = args.pos / options_.page_tokens; page_no <= last_page; ++page_no) {
    const PageId before = table.page(page_no);
    if (before != kNoPage && pool.owners(before) == 1) continue;
    edits_.push_back({.page_no = page_no, .page_id = before});
    unclaimed += table.ClaimedAfterReclaim(page_no, first_page) ? 0 : 1;
  }
  // Pages that skip_to sets free are used again at once: the pool may be full but for them.
  for (int64_t i = table.first_page(); i < std::min(first_page, table.end_page()); ++i) {
    if (page_ids_.size() == edits_.size()) break;
    const PageId page_id = table.page(i);
    if (pool.owners(page_id) > 1) continue;
    page_ids_.push_back(page_id);
    unclaimed -= table.Claimed(i) ? 0 : 1;
  }
  pages_recycled_ = page_ids_.size();
  if (unclaimed > 0 && unclaimed > pages.Left(pool)) {
    return absl::ResourceExhaustedError(
        absl::StrCat(Asked(args), ": needs ", unclaimed, " pages that are not reserved for it, ",
                     pages.Left(pool), " of ", pages.max,
                     " are left; free sequences, create with expected_tokens, or retry later"));
  }
  page_ids_.resize(edits_.size());
  const Charge charge = ChargeOf(seq, static_cast<size_t>(group));
  absl::Status status = pool.Alloc(absl::MakeSpan(page_ids_).subspan(pages_recycled_));
  FP8KVD_CHECK(status.ok());  // reserved pages are free pages (page_pool.h)
  for (size_t i = 0; i < edits_.size(); ++i) {
    const PageId before = edits_[i].page_id;
    edits_[i].page_id = page_ids_[i];
    if (before != kNoPage) copies_.push_back({.from = before, .to = page_ids_[i]});
  }
  return absl::OkStatus();
}

absl::StatusOr<AppendPlan> SeqStore::PlanAppend(SeqIndex seq_index, const AppendArgs& args) {
  FP8KVD_CHECK(!plan_open_);
  const Seq& seq = At(seq_index);
  absl::Status status = CheckLive(seq);
  if (status.ok()) status = CheckLayer(seq, args.layer);
  if (!status.ok()) return status;
  const Place place = PlaceOf(seq, args.layer);
  const SeqGroup& group = seq.groups[static_cast<size_t>(place.group)];
  const auto group_layer = static_cast<size_t>(place.group_layer);
  const int64_t seq_len = group.seq_lens[group_layer];
  absl::StatusOr<AppendVerdict> verdict = JudgeAppend(args, seq_len, group.replays[group_layer]);
  if (!verdict.ok()) return verdict.status();
  plan_ = {.verdict = *verdict,
           .seq = seq_index,
           .model = seq.model,
           .group = place.group,
           .group_layer = place.group_layer,
           .pos = args.pos,
           .n = args.n,
           .seq_len_after = seq_len,
           .copies = {},
           .edits = {}};
  if (*verdict == AppendVerdict::kReplay) return plan_;
  status = CheckSkip(place, seq, args);
  if (status.ok()) status = CheckRunAhead(place, seq, args);
  if (status.ok()) status = TakePages(seq, place.group, args);
  if (!status.ok()) return status;
  plan_.seq_len_after = args.pos + args.n;
  plan_.copies = copies_;
  plan_.edits = edits_;
  plan_args_ = args;
  plan_open_ = true;
  return plan_;
}

absl::Span<const PlannedEdit> SeqStore::pages_planned() const {
  if (!plan_open_) return {};
  return absl::MakeConstSpan(edits_).subspan(pages_recycled_);
}

void SeqStore::Abandon(const AppendPlan& plan) {
  FP8KVD_CHECK(plan_open_ && plan.seq == plan_.seq);
  const Charge charge = ChargeOf(At(plan_.seq), static_cast<size_t>(plan_.group));
  MutablePool(plan_.model, plan_.group)
      .Unalloc(absl::MakeConstSpan(page_ids_).subspan(pages_recycled_));
  plan_open_ = false;
}

void SeqStore::Commit(const AppendPlan& plan) {
  FP8KVD_CHECK(plan_open_ && plan.seq == plan_.seq);
  plan_open_ = false;
  Seq& seq = At(plan_.seq);
  SeqGroup& group = seq.groups[static_cast<size_t>(plan_.group)];
  const Charge charge = ChargeOf(seq, static_cast<size_t>(plan_.group));
  const BlockTable::Shape& shape = Shape(seq, {plan_.group, plan_.group_layer});
  const int64_t seq_len_min_before = group.seq_len_min;
  if (plan_args_.skip_to > group.first_pos) {
    group.first_pos = plan_args_.skip_to;
    for (int64_t& seq_len : group.seq_lens) seq_len = std::max(seq_len, group.first_pos);
    group.FindSlowest();
    group.table.Reclaim(group.first_pos / shape.page_tokens, static_cast<int64_t>(pages_recycled_));
    group.table.MoveClaims(group.seq_len_min);
  }
  for (const PlannedEdit& edit : edits_) group.table.Set(edit.page_no, edit.page_id);
  const auto group_layer = static_cast<size_t>(plan_.group_layer);
  group.SetSeqLen(group_layer, plan_.seq_len_after);
  group.replays[group_layer].Push(plan_.pos, plan_.n, plan_args_.digest);
  if (group.seq_len_min == seq_len_min_before) return;

  const int64_t kept_from = group.seq_len_min - shape.window - shape.reclaim_slack_tokens;
  if (shape.window > 0 && kept_from / shape.page_tokens > group.table.first_page()) {
    group.table.Reclaim(kept_from / shape.page_tokens, 0);
    group.first_pos = std::max(group.first_pos, group.table.first_page() * shape.page_tokens);
  }
  group.table.MoveClaims(group.seq_len_min);
}

}  // namespace fp8kvd::cache
