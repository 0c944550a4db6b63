// server/ops/history.h: the last minutes as series of numbers: what counters moved by between one
// look and the next. Feeds the status page; Prometheus keeps its own.
//
// Promises: a bounded number of samples, the oldest dropped first; a number that nothing was
//   observed for is NaN.
// Threads: Add on one, Copy from any.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "absl/types/span.h"

#include "server/engine/stats.h"
#include "server/ops/metrics.h"

namespace fp8kvd::ops {

// Everything that counts, at one moment.
struct Totals {
  int64_t time_ms = 0;         // since 1970
  engine::EngineStats engine;  // of all devices together
  CallTotals calls;
  std::vector<engine::EngineStats> devices = {};  // each
};

class History {
 public:
  static constexpr int64_t kIntervalMs = 2000;
  static constexpr size_t kSamplesMax = 150;  // 5 minutes

  // Names with units, in the order of a sample's values. Latencies are quantiles of what ended
  // within the interval.
  static constexpr std::array<const char*, 18> kSeries = {
      "seqs",           "queue_items",        "pages_used_ratio",     "rows_per_s",
      "launches_per_s", "batch_rows_mean",    "append_tokens_per_s",  "kv_read_bytes_per_s",
      "calls_per_s",    "calls_failed_per_s", "received_bytes_per_s", "sent_bytes_per_s",
      "call_p50_s",     "call_p99_s",         "queue_p50_s",          "queue_p99_s",
      "kernel_p50_s",   "kernel_p99_s"};

  struct Sample {
    int64_t time_ms = 0;
    std::array<double, kSeries.size()> values{};
  };

  // The first one only begins; every later one makes a sample.
  void Add(Totals totals);

  std::deque<Sample> Copy() const;  // oldest first

 private:
  std::optional<Totals> before_;
  mutable std::mutex mutex_;
  std::deque<Sample> samples_;
};

// The value below which `share` of the observations lie, linear within a bucket: counts[i] are
// those in (bounds[i - 1], bounds[i]], the last ones lie above all bounds. NaN of nothing.
double QuantileOf(double share, absl::Span<const uint64_t> counts, absl::Span<const double> bounds);

}  // namespace fp8kvd::ops
