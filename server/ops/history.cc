#include "server/ops/history.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace fp8kvd::ops {
namespace {

constexpr double kNothing = std::numeric_limits<double>::quiet_NaN();
constexpr int32_t kEngineBounds = engine::Histogram::kBuckets - 1;

uint64_t Moved(uint64_t before, uint64_t now) { return now - std::min(before, now); }

// Seconds, of a histogram in microseconds.
double EngineQuantile(double share, const engine::Histogram& before, const engine::Histogram& now) {
  std::array<uint64_t, engine::Histogram::kBuckets> counts{};
  std::array<double, kEngineBounds> bounds{};
  for (size_t i = 0; i < counts.size(); ++i) counts[i] = Moved(before.counts[i], now.counts[i]);
  for (size_t i = 0; i < bounds.size(); ++i) {
    bounds[i] = static_cast<double>(uint64_t{1} << i) / 1e6;
  }
  return QuantileOf(share, counts, bounds);
}

double CallQuantile(double share, const LatencyCounts& before, const LatencyCounts& now) {
  std::array<uint64_t, kLatencyBuckets> counts{};
  std::array<double, kLatencyBoundsUs.size()> bounds{};
  for (size_t i = 0; i < counts.size(); ++i) counts[i] = Moved(before.counts[i], now.counts[i]);
  for (size_t i = 0; i < bounds.size(); ++i) {
    bounds[i] = static_cast<double>(kLatencyBoundsUs[i]) / 1e6;
  }
  return QuantileOf(share, counts, bounds);
}

uint64_t KvReadBytes(const engine::EngineStats& stats) {
  uint64_t bytes = 0;
  for (const engine::ModelStats& model : stats.models) bytes += model.kv_bytes_read_total;
  return bytes;
}

double PagesUsedRatio(const engine::EngineStats& stats) {
  double used = 0;
  double total = 0;
  for (const engine::PoolStats& pool : stats.pools) {
    used += static_cast<double>(pool.pages_used);
    total += static_cast<double>(pool.pages_total);
  }
  return total == 0 ? 0 : used / total;
}

History::Sample Difference(const Totals& before, const Totals& now) {
  const double seconds =
      static_cast<double>(std::max<int64_t>(now.time_ms - before.time_ms, 1)) / 1e3;
  const auto rate = [seconds](uint64_t from, uint64_t to) {
    return static_cast<double>(Moved(from, to)) / seconds;
  };
  const engine::EngineStats& a = before.engine;
  const engine::EngineStats& b = now.engine;
  const uint64_t launches = Moved(a.decode_launches_total, b.decode_launches_total);
  const uint64_t rows = Moved(a.rows_total, b.rows_total);
  return {
      .time_ms = now.time_ms,
      .values = {
          static_cast<double>(b.seqs), static_cast<double>(b.queue_items), PagesUsedRatio(b),
          rate(a.rows_total, b.rows_total), rate(a.decode_launches_total, b.decode_launches_total),
          launches == 0 ? kNothing : static_cast<double>(rows) / static_cast<double>(launches),
          rate(a.append_tokens_total, b.append_tokens_total), rate(KvReadBytes(a), KvReadBytes(b)),
          rate(before.calls.calls, now.calls.calls),
          rate(before.calls.calls_failed, now.calls.calls_failed),
          rate(before.calls.received_bytes, now.calls.received_bytes),
          rate(before.calls.sent_bytes, now.calls.sent_bytes),
          CallQuantile(0.5, before.calls.decode, now.calls.decode),
          CallQuantile(0.99, before.calls.decode, now.calls.decode),
          EngineQuantile(0.5, a.queue_us, b.queue_us), EngineQuantile(0.99, a.queue_us, b.queue_us),
          EngineQuantile(0.5, a.kernel_us, b.kernel_us),
          EngineQuantile(0.99, a.kernel_us, b.kernel_us)}};
}

}  // namespace

double QuantileOf(double share, absl::Span<const uint64_t> counts,
                  absl::Span<const double> bounds) {
  uint64_t all = 0;
  for (const uint64_t count : counts) all += count;
  if (all == 0) return kNothing;
  const double rank = share * static_cast<double>(all);
  double below = 0;
  for (size_t i = 0; i < bounds.size(); ++i) {
    const auto count = static_cast<double>(counts[i]);
    const double low = i == 0 ? 0 : bounds[i - 1];
    if (count > 0 && below + count >= rank) {
      return low + (bounds[i] - low) * std::max(0.0, rank - below) / count;
    }
    below += count;
  }
  return bounds.back();
}

void History::Add(Totals totals) {
  if (before_.has_value()) {
    const Sample sample = Difference(*before_, totals);
    const std::lock_guard<std::mutex> lock(mutex_);
    samples_.push_back(sample);
    if (samples_.size() > kSamplesMax) samples_.pop_front();
  }
  before_ = std::move(totals);
}

std::deque<History::Sample> History::Copy() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return samples_;
}

}  // namespace fp8kvd::ops
