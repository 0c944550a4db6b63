// server/ops/buckets.h: the bounds of gRPC's own latency histograms (gRFC A66), so that ours can
// stand on one dashboard with those of clients and of other servers; and a histogram in them that
// any thread may fill.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace fp8kvd::ops {

// Upper bounds, in microseconds: 0 to 100 s.
inline constexpr std::array<int64_t, 41> kLatencyBoundsUs = {
    0,         10,        50,         100,        300,        600,        800,
    1'000,     2'000,     3'000,      4'000,      5'000,      6'000,      8'000,
    10'000,    13'000,    16'000,     20'000,     25'000,     30'000,     40'000,
    50'000,    65'000,    80'000,     100'000,    130'000,    160'000,    200'000,
    250'000,   300'000,   400'000,    500'000,    650'000,    800'000,    1'000'000,
    2'000'000, 5'000'000, 10'000'000, 20'000'000, 50'000'000, 100'000'000};
inline constexpr size_t kLatencyBuckets = kLatencyBoundsUs.size() + 1;  // the last has no bound

// A copy; counts are not cumulative.
struct LatencyCounts {
  std::array<uint64_t, kLatencyBuckets> counts{};
  uint64_t count = 0;
  uint64_t sum_us = 0;
};

// Threads: any, no lock.
class LatencyHistogram {
 public:
  void Observe(int64_t us) {
    us = std::max<int64_t>(us, 0);
    const auto* const bound =
        std::lower_bound(kLatencyBoundsUs.begin(), kLatencyBoundsUs.end(), us);
    counts_[static_cast<size_t>(bound - kLatencyBoundsUs.begin())].fetch_add(
        1, std::memory_order_relaxed);
    sum_us_.fetch_add(static_cast<uint64_t>(us), std::memory_order_relaxed);
  }
  void AddTo(LatencyCounts* to) const {
    for (size_t i = 0; i < kLatencyBuckets; ++i) {
      const uint64_t count = counts_[i].load(std::memory_order_relaxed);
      to->counts[i] += count;
      to->count += count;
    }
    to->sum_us += sum_us_.load(std::memory_order_relaxed);
  }

 private:
  std::array<std::atomic<uint64_t>, kLatencyBuckets> counts_{};
  std::atomic<uint64_t> sum_us_{0};
};

}  // namespace fp8kvd::ops
