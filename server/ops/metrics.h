// server/ops/metrics.h: everything that Prometheus may ask: calls by method and code with their
// latencies, and the engine's counters as of the scrape. Names start with fp8kvd_, units are base
// units.
//
// Promises: one scrape sees one copy of the engine's stats, so sums over them hold
//   (fp8kvd_pages{state="used"} + {state="free"} is the pool's total).
// Threads: any. Observe takes no lock.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/engine/stats.h"

namespace fp8kvd::ops {

// Calls of one rpc method.
class MethodMetrics {
 public:
  static constexpr int kCodes = 17;  // of gRPC

  // A call ended with this gRPC code after so long.
  void Observe(int code, int64_t elapsed_us);

 private:
  friend class Metrics;
  std::string name_;
  std::array<std::atomic<uint64_t>, kCodes> calls_{};
  std::array<std::atomic<uint64_t>, engine::Histogram::kBuckets> buckets_{};
  std::atomic<uint64_t> sum_us_{0};
};

// What does not change while the daemon runs, and names for the indices of EngineStats.
struct MetricLabels {
  std::string version;
  std::string incarnation;
  std::string device;
  std::vector<std::string> models;
};

class Metrics {
 public:
  // The counters of one method; the same object for the same name. Before the first call only.
  MethodMetrics* Method(const std::string& name);

  // Where a scrape gets the engine's numbers; before that it has only the calls'. Once, at start.
  void SetEngine(MetricLabels labels, std::function<engine::EngineStats()> stats);

  // The text of a scrape.
  std::string Scrape() const;

 private:
  std::vector<std::unique_ptr<MethodMetrics>> methods_;
  MetricLabels labels_;
  std::function<engine::EngineStats()> stats_;
};

}  // namespace fp8kvd::ops
