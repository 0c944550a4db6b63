#include "server/live_load.h"

#include <utility>

namespace fp8kvd {

LiveLoad::LiveLoad(const config::Loaded* loaded, const engine::Clock* clock,
                   std::function<engine::EngineStats()> stats)
    : loaded_(loaded),
      clock_(clock),
      stats_(std::move(stats)),
      models_(loaded->models.size(),
              Model{.start_us = clock->NowUs(), .at_start = {}, .closed = {}}) {}

std::optional<config::LiveVerdict> LiveLoad::Judge(int32_t model, const engine::ModelStats& now,
                                                   int64_t now_us) const {
  const engine::ModelStats& start = models_[model].at_start;
  const auto since = [](uint64_t end, uint64_t begin) { return static_cast<double>(end - begin); };
  const config::ServedLoad load = {
      .seconds = static_cast<double>(now_us - models_[model].start_us) * 1e-6,
      .requests = since(now.decode_requests_total, start.decode_requests_total),
      .items = since(now.decode_rows_total, start.decode_rows_total),
      .seq_tokens = since(now.seq_tokens_total, start.seq_tokens_total),
      .kv_bf16_bytes = since(now.kv_bf16_bytes_read_total, start.kv_bf16_bytes_read_total)};
  if (load.requests < loaded_->models[model].geometry.layers || load.items == 0) {
    return std::nullopt;
  }
  absl::StatusOr<config::LiveVerdict> verdict = config::JudgeServedLoad(
      loaded_->options.models[model], loaded_->models[model].decision, loaded_->options.policy,
      loaded_->calibration.has_value() ? &*loaded_->calibration : nullptr, load);
  if (!verdict.ok()) return std::nullopt;  // its shape passed at start, so there is none
  return *std::move(verdict);
}

std::vector<std::string> LiveLoad::Tick(bool last) {
  const engine::EngineStats stats = stats_();
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t now_us = clock_->NowUs();
  std::vector<std::string> hints;
  const int64_t window_us = int64_t{loaded_->options.policy.live_window_ms} * 1000;
  for (size_t i = 0; i < models_.size(); ++i) {
    Model& model = models_[i];
    if (!last && now_us - model.start_us < window_us) continue;
    std::optional<config::LiveVerdict> verdict =
        Judge(static_cast<int32_t>(i), stats.models[i], now_us);
    if (!verdict.has_value()) continue;  // too little was served: its window stays open
    model.start_us = now_us;
    model.at_start = stats.models[i];
    if (verdict->contradicts && !model.told) hints.push_back(verdict->hint);
    model.told = verdict->contradicts;
    model.closed = std::move(verdict);
  }
  return hints;
}

std::optional<config::LiveVerdict> LiveLoad::Of(int32_t model) const {
  const engine::EngineStats stats = stats_();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (models_[model].closed.has_value()) return models_[model].closed;
  return Judge(model, stats.models[model], clock_->NowUs());
}

}  // namespace fp8kvd
