// server/engine/stats.h: what the engine counts, as plain numbers. Engine::stats() gives a copy
// that was taken whole: its numbers belong to one moment, so sums over them hold.
//
// Does not manage: names of metrics, scraping (server/ops); where a number came from (the parts).
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace fp8kvd::engine {

// Counts values by powers of two. Bucket b holds the values in (2^(b-1), 2^b], bucket 0 those <= 1;
// the last one holds everything above the one before.
struct Histogram {
  static constexpr int32_t kBuckets = 28;  // up to 2^27: 134 s in microseconds, 134 M tokens
  std::array<uint64_t, kBuckets> counts{};
  uint64_t count = 0;
  uint64_t sum = 0;

  static int32_t BucketOf(uint64_t value) {
    const int32_t bucket = value <= 1 ? 0 : std::bit_width(value - 1);
    return bucket < kBuckets ? bucket : kBuckets - 1;
  }
  void Observe(uint64_t value) {
    ++counts[BucketOf(value)];
    ++count;
    sum += value;
  }
};

// The same for many writers without a lock. A copy may miss what is being counted just now.
class SharedHistogram {
 public:
  void Observe(uint64_t value) {
    counts_[Histogram::BucketOf(value)].fetch_add(1, std::memory_order_relaxed);
    sum_.fetch_add(value, std::memory_order_relaxed);
  }
  Histogram Copy() const {
    Histogram copy;
    for (int32_t i = 0; i < Histogram::kBuckets; ++i) {
      copy.counts[i] = counts_[i].load(std::memory_order_relaxed);
      copy.count += copy.counts[i];
    }
    copy.sum = sum_.load(std::memory_order_relaxed);
    return copy;
  }

 private:
  std::array<std::atomic<uint64_t>, Histogram::kBuckets> counts_{};
  std::atomic<uint64_t> sum_{0};
};

// What one model's decodes read: the live cache share follows from it. A step reads each layer
// once, so steps = decode_requests_total / layers.
struct ModelStats {
  int64_t seqs = 0;                       // now
  uint64_t decode_requests_total = 0;     // a message on several devices is one
  uint64_t decode_rows_total = 0;         // items that were launched
  uint64_t seq_tokens_total = 0;          // of their sequences, the query's included
  uint64_t kv_bytes_read_total = 0;       // as stored, window-limited
  uint64_t kv_bf16_bytes_read_total = 0;  // what bf16 would have read for the same items
  Histogram context_tokens;               // keys that an item's last query sees
};

// One page pool. pages_used + pages_free == pages_total in every copy.
struct PoolStats {
  int32_t model = 0;
  int32_t group = 0;
  int64_t pages_total = 0;
  int64_t pages_used = 0;
  int64_t pages_free = 0;
  int64_t pages_reserved = 0;         // of the free ones, promised to sequences
  uint64_t page_evictions_total = 0;  // pages that sequences gave up, a window having passed them
};

// What one tenant has, and had. pages_total of its pools is what it may have of each.
struct TenantStats {
  uint64_t requests_refused_total = 0;  // of all devices, as queue_items: they share its queue
  uint64_t decode_rows_total = 0;
  uint64_t kv_bytes_read_total = 0;
  int64_t queue_items = 0;       // now: taken and not yet answered
  int64_t seqs = 0;              // now
  std::vector<PoolStats> pools;  // as EngineStats::pools
};

struct EngineStats {
  // Requests by kind, in the order of Request::Kind. taken == answered + those that wait or run.
  static constexpr int32_t kKinds = 3;
  std::array<uint64_t, kKinds> requests_taken_total{};
  std::array<uint64_t, kKinds> requests_answered_total{};
  std::array<uint64_t, kKinds> requests_failed_total{};  // answered with an error for the whole
  uint64_t requests_refused_total = 0;                   // by Submit: full, draining, failed
  uint64_t requests_late_total = 0;                      // deadline passed before the work began
  uint64_t requests_cancelled_total = 0;                 // cancelled before the work began

  uint64_t items_failed_total = 0;
  uint64_t decode_launches_total = 0;
  uint64_t append_launches_total = 0;
  uint64_t rows_total = 0;           // decode rows launched
  uint64_t query_tokens_total = 0;   // their query tokens
  uint64_t append_tokens_total = 0;  // (token, layer) pairs committed
  uint64_t append_bytes_total = 0;   // of K and V as they came
  uint64_t append_slices_total = 0;  // of bulk appends
  uint64_t replays_total = 0;        // appends that were there already
  uint64_t page_copies_total = 0;
  uint64_t forks_total = 0;
  uint64_t lease_expiries_total = 0;

  Histogram batch_rows;  // rows of a decode launch
  // Where a decode's time goes, one after the other.
  Histogram stage_us;         // of an item: from arrival until it was read, checked and copied
  Histogram queue_us;         // of an item: from then until its launch
  Histogram kernel_us;        // of a launch: until its fence was seen
  Histogram reply_us;         // of a request: from then until its reply was made
  Histogram append_queue_us;  // of a bulk append: from arrival until its first slice

  // Calls that took device, pinned or growing host memory: stands still once the engine runs.
  int64_t device_allocations_total = 0;

  // Now.
  int64_t queue_items = 0;  // taken and not yet answered
  int64_t launches_inflight = 0;
  int64_t seqs = 0;
  int64_t staging_slots_used = 0;
  int64_t staging_slots_total = 0;
  bool draining = false;
  bool failed = false;

  std::vector<ModelStats> models;
  std::vector<PoolStats> pools;
  std::vector<TenantStats> tenants;  // by TenantId
};

// Of several devices (one at least, of equal models and tenants) together: sums, but for what
// devices share.
EngineStats SumOf(absl::Span<const EngineStats> devices);

}  // namespace fp8kvd::engine
