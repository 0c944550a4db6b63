// server/ops/metrics.h: everything that Prometheus may ask: calls by method and code with their
// latencies, the engine's counters and the GPU's as of the scrape. Names start with fp8kvd_, units
// are base units; labels are names of methods, codes, models and the like, never a client's words.
//
// Promises: one scrape sees one copy of each engine's stats, so sums over them hold
//   (fp8kvd_pages{state="used"} + {state="free"} is the pool's total). Numbers without a label
//   `device` are of all devices together; fp8kvd_device_… has each.
// Threads: any. What calls count with takes no lock.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/stats.h"
#include "server/ops/buckets.h"
#include "server/ops/nvml.h"

namespace fp8kvd::ops {

// Calls of one rpc method. Whatever clients do, its series are as many as gRPC has codes and
// buckets.
class MethodMetrics {
 public:
  static constexpr size_t kCodes = 17;  // of gRPC

  // A call ended with this gRPC code after so long.
  void Observe(int code, int64_t elapsed_us) {
    const auto index = static_cast<size_t>(code);  // a negative one is large
    by_code_[index < kCodes ? index : kUnknown].Observe(elapsed_us);
  }
  // Bytes of messages, as they are in gRPC's hands.
  void Received(uint64_t bytes) { received_bytes_.fetch_add(bytes, std::memory_order_relaxed); }
  void Sent(uint64_t bytes) { sent_bytes_.fetch_add(bytes, std::memory_order_relaxed); }

 private:
  friend class Metrics;
  static constexpr size_t kUnknown = 2;
  std::string name_;
  std::array<LatencyHistogram, kCodes> by_code_;
  std::atomic<uint64_t> received_bytes_{0};
  std::atomic<uint64_t> sent_bytes_{0};
};

// Calls of all methods since the start.
struct CallTotals {
  uint64_t calls = 0;
  uint64_t calls_failed = 0;  // other than OK
  uint64_t received_bytes = 0;
  uint64_t sent_bytes = 0;
  LatencyCounts decode;  // of unary Decodes that ended with OK
};

// Sessions of the same-host transport.
struct SharedMemoryStats {
  int64_t sessions = 0;  // now
  int64_t bytes = 0;     // of their memory
  uint64_t opened_total = 0;
  uint64_t refused_total = 0;         // no room in a quota
  uint64_t ended_for_lies_total = 0;  // the client broke the contract
};

// Sequences that outlive a restart.
struct SnapshotStats {
  // What this run restored at its start; zero: nothing.
  struct Restored {
    int64_t seqs = 0;
    int64_t bytes = 0;  // of pages
    int64_t took_us = 0;
  };
  Restored restored;
  bool is_refused = false;    // there was a snapshot, and it could not be restored
  int64_t written_bytes = 0;  // so far, of the one that is being saved
};

// One model's served load, as server/live_load.h sees it; nothing served: all 0.
struct LoadSample {
  double batch = 0;   // sequences in a step
  double tokens = 0;  // of each
  double cache_share = 0;
};

// What does not change while the daemon runs, and names for the indices of EngineStats.
struct MetricLabels {
  struct Model {
    std::string name;
    std::vector<std::string> group_precisions;
  };
  std::string version = {};
  std::string compiler = {};
  std::string incarnation = {};
  struct Device {
    std::string name;   // "cuda:0"
    std::string model;  // as its vendor calls it
  };
  std::string device = {};       // "cpu", "cuda"
  std::string device_name = {};  // of the first
  std::vector<Device> devices = {};
  bool has_cuda = false;  // of the build
  std::vector<Model> models;
  std::vector<std::string> tenants = {};  // by TenantId; empty: one, that all are
};

class Metrics {
 public:
  // The counters of one method; the same object for the same name. Before the first call only.
  MethodMetrics* Method(const std::string& name);

  // Where a scrape gets the engines' numbers, as labels.devices names them; before that it has only
  // the calls'. Once, at start.
  void SetEngines(
      MetricLabels labels, std::function<std::vector<engine::EngineStats>()> stats,
      std::function<LoadSample(int32_t model)> load = [](int32_t) { return LoadSample{}; });
  // Where it gets a GPU's; before that, and where it fails, there are none. At start.
  void AddGpu(std::string device, std::unique_ptr<Nvml> nvml) {
    gpus_.push_back({std::move(device), std::move(nvml)});
  }

  CallTotals Calls() const;

  // The same of the same-host transport. Once, at start.
  void SetSharedMemory(std::function<SharedMemoryStats()> stats);

  // The same of snapshots, where there are any. Once, at start.
  void SetSnapshots(std::function<SnapshotStats()> stats);

  // The text of a scrape.
  std::string Scrape() const;

 private:
  std::vector<std::unique_ptr<MethodMetrics>> methods_;
  MetricLabels labels_;
  std::function<std::vector<engine::EngineStats>()> stats_;
  std::vector<std::pair<std::string, std::unique_ptr<Nvml>>> gpus_;
  std::function<LoadSample(int32_t)> load_;
  std::function<SharedMemoryStats()> shared_memory_;
  std::function<SnapshotStats()> snapshots_;
};

}  // namespace fp8kvd::ops
