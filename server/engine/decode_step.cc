#include "server/engine/decode_step.h"

#include <algorithm>

namespace fp8kvd::engine {
namespace {

int32_t OutBytes(kernels::OutType out_type) { return out_type == kernels::OutType::kFp32 ? 4 : 2; }

}  // namespace

DecodeStep::DecodeStep(const StepContext& context, AppendRows* appends)
    : context_(context), appends_(appends) {
  rows_.reserve(context.options.batch_rows_max);
  failed_.reserve(context.options.batch_rows_max);
}

absl::Status DecodeStep::Run(const Batcher::Pick& pick, TimeUs now, Launch* launch) {
  rows_.clear();
  failed_.clear();
  launch->items.clear();
  launch->append = nullptr;
  appends_->Begin();
  for (const BatchItem& batch_item : pick.items) {
    const Outcome outcome = Prepare(batch_item);
    if (outcome == Outcome::kWaits) break;
    if (outcome == Outcome::kFailed) {
      batch_item.item().stage = DecodeItem::Stage::kAnswered;
      failed_.push_back(batch_item);
      continue;
    }
    DecodeRequest& request = *batch_item.request;
    batch_item.item().stage = DecodeItem::Stage::kRunning;
    launch->items.push_back(batch_item);
    AddRow(request, batch_item.item());
    Count(request, batch_item.item());
    const TimeUs staged = std::max(request.staged, request.arrived);
    context_.stats.stage_us.Observe(static_cast<uint64_t>(staged - request.arrived));
    context_.stats.queue_us.Observe(static_cast<uint64_t>(std::max<TimeUs>(0, now - staged)));
  }
  if (rows_.empty()) return absl::OkStatus();

  for (const BatchItem& batch_item : launch->items) {
    batch_item.request->launched = now;
    batch_item.request->batch_items = static_cast<int32_t>(rows_.size());
  }
  if (absl::Status status = appends_->Launch(pick.shape.head_dim, pick.shape.precision);
      !status.ok()) {
    return status;
  }
  EngineStats& stats = context_.stats;
  ++stats.decode_launches_total;
  if (!appends_->empty()) ++stats.append_launches_total;
  stats.rows_total += rows_.size();
  stats.batch_rows.Observe(rows_.size());
  return context_.backend.Decode(
      kernels::DecodeParams{.rows = rows_.data(),
                            .rows_count = static_cast<int32_t>(rows_.size()),
                            .head_dim = pick.shape.head_dim,
                            .group = pick.shape.group,
                            .precision = pick.shape.precision,
                            .out_type = pick.shape.out_type,
                            .batch_invariant = context_.options.batch_invariant});
}

DecodeStep::Outcome DecodeStep::Prepare(const BatchItem& batch_item) {
  const DecodeRequest& request = *batch_item.request;
  DecodeItem& item = batch_item.item();
  const auto fail = [&item](const absl::Status& status) {
    item.status = status;
    if (absl::IsResourceExhausted(status)) item.retry_after_ms = kRoomRetryMs;
    return Outcome::kFailed;
  };
  const absl::StatusOr<cache::SeqIndex> seq = context_.store.Find(item.handle, request.tenant);
  if (!seq.ok()) return fail(seq.status());

  if (request.k != nullptr) {
    const int64_t offset = int64_t{item.row} * context_.models[request.model].geometry.head_dim *
                           context_.models[request.model].GroupOf(request.layer).kv_heads;
    const absl::StatusOr<AppendRows::Outcome> planned = appends_->Plan(
        AppendRows::Purpose::kQuery, *seq,
        cache::AppendArgs{
            .layer = request.layer, .pos = item.pos, .n = item.q_len, .digest = item.kv_digest},
        request.k + offset, request.v + offset);
    if (!planned.ok()) return fail(planned.status());
    if (*planned == AppendRows::Outcome::kWait) return Outcome::kWaits;
    if (*planned == AppendRows::Outcome::kPlanned) return Outcome::kRuns;
  }
  if (absl::Status status = context_.store.CheckVisible(*seq, request.layer, item.pos, item.q_len);
      !status.ok()) {
    return fail(status);
  }
  return Outcome::kRuns;
}

void DecodeStep::AddRow(const DecodeRequest& request, const DecodeItem& item) {
  const ModelGeometry& geometry = context_.models[request.model].geometry;
  const LayerGeometry& layer = geometry.layer[request.layer];
  const LayerGroup& group = geometry.groups[layer.group];
  const int64_t row_values = int64_t{geometry.q_heads} * group.head_dim;
  const int64_t row = item.row;
  rows_.push_back(kernels::DecodeRow{
      .q = request.q + row * row_values,
      .out = static_cast<uint8_t*>(request.out) + row * row_values * OutBytes(request.out_type),
      .lse = request.lse == nullptr ? nullptr : request.lse + row * geometry.q_heads,
      .sink_logits = request.sink_logits,
      .block_table = context_.pages.BlockTable(item.seq, layer.group),
      .base = context_.pages.LayerBase(request.model, layer.group, layer.group_layer),
      .page_stride = context_.pages.page_stride(request.model, layer.group),
      .pos = static_cast<int32_t>(item.pos),
      .q_len = item.q_len,
      .kv_heads = group.kv_heads,
      .window = layer.window,
      .sm_scale = geometry.sm_scale,
      .softcap = layer.softcap});
}

void DecodeStep::Count(const DecodeRequest& request, const DecodeItem& item) {
  const LayerGroup& group = context_.models[request.model].GroupOf(request.layer);
  const int64_t tokens = KeysSeen(group, item.pos, item.q_len);
  ModelStats& model = context_.stats.models[request.model];
  ++model.decode_rows_total;
  model.seq_tokens_total += static_cast<uint64_t>(item.pos + item.q_len);
  const int64_t kv_bytes =
      tokens * group.kv_heads * KvBytesPerToken(group.precision, group.head_dim);
  model.kv_bytes_read_total += kv_bytes;
  model.kv_bf16_bytes_read_total +=
      tokens * group.kv_heads * KvBytesPerToken(Precision::kBf16, group.head_dim);
  model.context_tokens.Observe(static_cast<uint64_t>(tokens));
  context_.stats.query_tokens_total += item.q_len;
  TenantStats& tenant = context_.stats.tenants[static_cast<uint32_t>(request.tenant)];
  ++tenant.decode_rows_total;
  tenant.kv_bytes_read_total += kv_bytes;
}

}  // namespace fp8kvd::engine
