// The device of fp8kvd_timed, the daemon on a device that computes nothing and takes the time that
// a GPU would: what gathers while it works, how long it idles and where a call's time goes can then
// be measured where there is no GPU. TIMED_DEVICE in the environment says how long things take:
//   launch_us,base_us,item_us,cache_gbps,bus_gbps     default 6,12,0.6,4200,50
// A decode keeps its caller for launch_us, and the device for base_us, item_us an item, and the
// bytes of the cache that it reads at cache_gbps; an append, for its rows at bus_gbps. Answers hold
// whatever lay in the slot. On exit it says on stderr for what part of the time since its first
// decode it was at work on decodes, and how many rows were in how many launches.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>

#include "absl/strings/str_cat.h"

#include "bench/null_backend.h"
#include "config/device_list.h"
#include "server/device.h"

namespace fp8kvd {
namespace {

using Clock = std::chrono::steady_clock;
using Us = std::chrono::duration<double, std::micro>;

struct Times {
  double launch_us = 6;
  double base_us = 12;
  double item_us = 0.6;
  double cache_gbps = 4200;
  double bus_gbps = 50;
};

class TimedBackend final : public bench::NullBackend {
 public:
  explicit TimedBackend(const Times& times) : times_(times) {}
  ~TimedBackend() override {
    const Us decoding = last_ - first_;
    if (decoding.count() > 0) {
      std::fprintf(stderr,
                   "timed device: busy with decodes %.3f of %.3f s, %lld launches, %lld rows\n",
                   busy_ / decoding, decoding.count() / 1e6, static_cast<long long>(launches_),
                   static_cast<long long>(rows_));
    }
  }

  kernels::DeviceInfo Device() const override {
    return kernels::DeviceInfo{.kind = "timed",
                               .name = "kernels that only take time",
                               .bytes_total = int64_t{1} << 37,
                               .bytes_free = int64_t{1} << 37,
                               .returns_at_once = true};
  }

  absl::Status Append(const kernels::AppendParams& params) override {
    double bytes = 0;
    for (int32_t i = 0; i < params.rows_count; ++i) {
      bytes += 4.0 * params.rows[i].n * params.rows[i].kv_heads * params.head_dim;
    }
    Queue(Us(bytes / times_.bus_gbps / 1e3));
    return absl::OkStatus();
  }

  absl::Status Decode(const kernels::DecodeParams& params) override {
    const Clock::time_point begin = Clock::now();
    if (first_ == Clock::time_point{}) first_ = begin;
    double bytes = 0;
    for (int32_t i = 0; i < params.rows_count; ++i) {
      const kernels::DecodeRow& row = params.rows[i];
      const int32_t keys = row.pos + row.q_len;
      bytes += static_cast<double>(row.window == 0 ? keys : std::min(keys, row.window)) *
               row.kv_heads *
               static_cast<double>(KvBytesPerToken(params.precision, params.head_dim));
    }
    while (Clock::now() - begin < Us(times_.launch_us)) {
    }
    const Us took(times_.base_us + times_.item_us * params.rows_count +
                  bytes / times_.cache_gbps / 1e3);
    Queue(took);
    busy_ += took;
    ++launches_;
    rows_ += params.rows_count;
    return absl::OkStatus();
  }

  absl::StatusOr<kernels::FenceId> Fence() override {
    ends_.push_back(free_);
    return kernels::FenceId{++taken_};
  }
  absl::StatusOr<bool> Passed(kernels::FenceId fence) override {
    const Clock::time_point now = Clock::now();
    while (!ends_.empty() && ends_.front() <= now) {
      ends_.pop_front();
      ++passed_;
    }
    last_ = now;
    return fence.value <= passed_;
  }

 private:
  void Queue(Us took) {
    free_ = std::max(free_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(took);
  }

  const Times times_;
  Clock::time_point free_;  // when all that was queued is done
  std::deque<Clock::time_point> ends_;
  uint64_t taken_ = 0;
  uint64_t passed_ = 0;
  Us busy_{0};
  int64_t launches_ = 0;
  int64_t rows_ = 0;
  Clock::time_point first_;
  Clock::time_point last_;
};

}  // namespace

absl::StatusOr<Devices> MakeDevices(const config::EngineOptions& options) {
  Times times;
  if (const char* at = std::getenv("TIMED_DEVICE");  // NOLINT(concurrency-mt-unsafe): at start
      at != nullptr) {
    double* const values[] = {&times.launch_us, &times.base_us, &times.item_us, &times.cache_gbps,
                              &times.bus_gbps};
    for (double* const value : values) {
      char* end = nullptr;
      *value = std::strtod(at, &end);
      if (end == at || *end != (value == values[4] ? '\0' : ',')) {
        return absl::InvalidArgumentError(
            "TIMED_DEVICE is launch_us,base_us,item_us,cache_gbps,bus_gbps: five numbers");
      }
      at = end + 1;
    }
  }
  Devices devices;
  for (int32_t i = 0; i < config::DevicesNamed(options); ++i) {
    Device& device = devices.all.emplace_back();
    device.name = absl::StrCat("timed:", i);
    device.backend = std::make_unique<TimedBackend>(times);
  }
  return devices;
}

}  // namespace fp8kvd
