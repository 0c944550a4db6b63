#include "server/engine/append_rows.h"

#include "absl/types/span.h"

#include "config/base/limits.h"

namespace fp8kvd::engine {

// n tokens touch n / kPageTokens + 2 pages at most.
AppendRows::AppendRows(const StepContext& context, int32_t rows_max, int64_t tokens_max)
    : context_(context) {
  copies_.reserve(int64_t{2} * rows_max + tokens_max / kPageTokens);
  edits_.reserve(int64_t{2} * rows_max + tokens_max / kPageTokens);
  rows_.reserve(rows_max);
}

void AppendRows::Begin() {
  copies_.clear();
  edits_.clear();
  rows_.clear();
  context_.freed.BeginLaunch();
}

absl::StatusOr<AppendRows::Outcome> AppendRows::Plan(Purpose purpose, cache::SeqIndex seq,
                                                     const cache::AppendArgs& args,
                                                     const uint16_t* k, const uint16_t* v) {
  absl::StatusOr<cache::AppendPlan> plan = context_.store.PlanAppend(seq, args);
  if (!plan.ok()) return plan.status();
  if (plan->verdict == cache::AppendVerdict::kReplay) {
    ++context_.stats.replays_total;
    return Outcome::kReplay;
  }
  if (purpose == Purpose::kQuery) {
    if (absl::Status status = context_.store.CheckPlanVisible(*plan); !status.ok()) {
      context_.store.Abandon(*plan);
      return status;
    }
  }
  for (const cache::PlannedEdit& edit : plan->edits) {
    if (context_.freed.WasFreed(plan->model, plan->group, edit.page_id)) {
      context_.store.Abandon(*plan);
      return Outcome::kWait;
    }
  }

  const PageMap& pages = context_.pages;
  for (const cache::PlannedCopy& copy : plan->copies) {
    copies_.push_back(kernels::PageCopy{.to = pages.Page(plan->model, plan->group, copy.to),
                                        .from = pages.Page(plan->model, plan->group, copy.from),
                                        .bytes = pages.page_stride(plan->model, plan->group)});
  }
  int32_t* const table = pages.BlockTable(plan->seq, plan->group);
  for (const cache::PlannedEdit& edit : plan->edits) {
    edits_.push_back(
        kernels::TableEdit{.at = table + edit.page_no, .page = static_cast<int32_t>(edit.page_id)});
  }
  const LayerGroup& group = context_.models[plan->model].geometry.groups[plan->group];
  rows_.push_back(
      kernels::AppendRow{.k = k,
                         .v = v,
                         .block_table = table,
                         .base = pages.LayerBase(plan->model, plan->group, plan->group_layer),
                         .page_stride = pages.page_stride(plan->model, plan->group),
                         .pos = static_cast<int32_t>(plan->pos),
                         .n = plan->n,
                         .kv_heads = group.kv_heads});
  EngineStats& stats = context_.stats;
  stats.append_tokens_total += plan->n;
  stats.append_bytes_total += uint64_t{4} * plan->n * group.kv_heads * group.head_dim;
  stats.page_copies_total += plan->copies.size();
  context_.store.Commit(*plan);
  return Outcome::kPlanned;
}

absl::Status AppendRows::Launch(int32_t head_dim, Precision precision, bool is_brought) {
  kernels::Backend& backend = context_.backend;
  if (!copies_.empty()) {
    if (absl::Status status = backend.CopyPages(copies_); !status.ok()) return status;
  }
  if (!edits_.empty()) {
    if (absl::Status status = backend.UpdateTables(edits_); !status.ok()) return status;
  }
  if (rows_.empty()) return absl::OkStatus();
  return backend.Append(kernels::AppendParams{.rows = rows_.data(),
                                              .rows_count = static_cast<int32_t>(rows_.size()),
                                              .head_dim = head_dim,
                                              .precision = precision,
                                              .is_brought = is_brought});
}

}  // namespace fp8kvd::engine
