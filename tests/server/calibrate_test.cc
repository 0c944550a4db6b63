#include "server/calibrate.h"

#include <set>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "config/model.h"
#include "kernels/cpu/backend.h"
#include "server/engine/worker_pool.h"

namespace fp8kvd {
namespace {

ModelGeometry Model(int32_t q_heads, int32_t kv_heads, int32_t head_dim) {
  config::ModelOptions options;
  options.name = "m";
  options.layers = 2;
  options.q_heads = q_heads;
  options.kv_heads = kv_heads;
  options.head_dim = head_dim;
  return config::MakeGeometry(options, Precision::kFp8Kv).value();
}

// Two models of one shape and one of another, in launches of at most 1 MiB.
config::Calibration Measured() {
  engine::WorkerPool workers(1);
  kernels::cpu::CpuBackend backend(&workers);
  const engine::SteadyClock clock;
  const std::vector<ModelGeometry> models = {Model(4, 2, 64), Model(4, 2, 64), Model(2, 2, 128)};
  const auto measured = Calibrate(
      {.backend = &backend, .clock = &clock, .models = models, .launch_bytes_max = 1 << 20});
  EXPECT_TRUE(measured.ok()) << measured.status();
  return measured.value_or(config::Calibration{});
}

TEST(Calibrate, TimesEveryShapeOnceAtEveryPointThatFits) {
  const config::Calibration measured = Measured();
  std::set<std::pair<int64_t, int64_t>> points;
  for (const config::CalibrationPoint& p : measured.points) {
    EXPECT_GT(p.bf16_us, 0);
    EXPECT_GT(p.fp8_kv_us, 0);
    if (p.head_dim != 64) continue;
    EXPECT_TRUE(points.insert({p.batch, p.tokens}).second);
  }
  // 1 MiB holds 2,048 tokens of 2 x 64 x 4 B, and room is made for 64 pages at least: 4,096.
  EXPECT_THAT(points, testing::UnorderedElementsAre(
                          std::pair(1, 16), std::pair(1, 64), std::pair(1, 256), std::pair(1, 1024),
                          std::pair(1, 4096), std::pair(4, 16), std::pair(4, 64), std::pair(4, 256),
                          std::pair(4, 1024), std::pair(16, 16), std::pair(16, 64),
                          std::pair(16, 256), std::pair(64, 16), std::pair(64, 64)));
  EXPECT_GT(measured.read_bytes_per_s, 1e6);
  EXPECT_EQ(measured.device_kind, "cpu");
}

TEST(Calibrate, MoreTokensTakeLonger) {
  const config::Calibration measured = Measured();
  const auto time = [&](int64_t tokens) {
    for (const config::CalibrationPoint& p : measured.points) {
      if (p.head_dim == 64 && p.batch == 1 && p.tokens == tokens) return p.bf16_us;
    }
    return 0.0;
  };
  EXPECT_GT(time(4096), 4 * time(64));  // 64 times the work
}

TEST(Calibrate, WhatItWritesGivesARatioForTheModelsThatItMeasured) {
  const auto read = config::ParseCalibration(config::FormatCalibration([] {
    config::Calibration measured = Measured();
    measured.version = "1";
    return measured;
  }()));
  ASSERT_TRUE(read.ok()) << read.status();
  const ModelGeometry model = Model(4, 2, 64);
  EXPECT_TRUE(
      config::MeasuredRatio(*read, model.groups[0], model.group_size(), 3, 700).has_value());
  const ModelGeometry other = Model(8, 2, 64);
  EXPECT_FALSE(
      config::MeasuredRatio(*read, other.groups[0], other.group_size(), 3, 700).has_value());
}

int64_t LaunchBytes(const char* kind, int64_t bytes_free) {
  kernels::DeviceInfo device;
  device.kind = kind;
  device.bytes_free = bytes_free;
  return CalibrationLaunchBytes(device);
}

TEST(CalibrationLaunchBytes, IsBoundedByWhatIsFree) {
  EXPECT_EQ(LaunchBytes("cpu", int64_t{1} << 40), 128 << 20);
  EXPECT_EQ(LaunchBytes("cuda", int64_t{80} << 30), int64_t{4} << 30);
  EXPECT_EQ(LaunchBytes("cuda", 80 << 20), 10 << 20);
}

}  // namespace
}  // namespace fp8kvd
