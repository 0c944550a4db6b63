// Against fakes of the library that the driver brings; what the real one answers shows on a GPU.
#include "server/ops/nvml.h"

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "server/ops/metrics.h"

namespace fp8kvd::ops {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr char kBusId[] = "00000000:3b:00.0";

class NvmlFault : public testing::Test {
 protected:
  // NOLINTNEXTLINE(concurrency-mt-unsafe): one thread
  void Ask(const char* fault) { setenv("FAKE_NVML_FAULT", fault, /*overwrite=*/1); }
  // NOLINTNEXTLINE(concurrency-mt-unsafe): one thread
  void TearDown() override { unsetenv("FAKE_NVML_FAULT"); }
};

TEST(Nvml, ReadsMemoryAndLoadOfTheDeviceOnThatBus) {
  const auto nvml = Nvml::Open(FAKE_NVML, kBusId);
  ASSERT_TRUE(nvml.ok()) << nvml.status();
  const absl::StatusOr<GpuReading> reading = (*nvml)->Read();
  ASSERT_TRUE(reading.ok()) << reading.status();
  EXPECT_EQ(reading->memory_bytes_used, 100'000U);
  EXPECT_EQ(reading->memory_bytes_free, 50'000U);
  EXPECT_DOUBLE_EQ(reading->busy_ratio, 0.73);
}

TEST(Nvml, WithoutTheLibrarySaysWhereItComesFrom) {
  const auto nvml = Nvml::Open("libnvidia-ml-is-not-here.so.1", kBusId);
  EXPECT_TRUE(absl::IsUnavailable(nvml.status()));
  EXPECT_THAT(std::string(nvml.status().message()), HasSubstr("NVIDIA_DRIVER_CAPABILITIES"));
}

TEST(Nvml, ALibraryThatLacksAFunctionIsRefused) {
  const auto nvml = Nvml::Open(FAKE_NVML_OLD, kBusId);
  EXPECT_TRUE(absl::IsUnavailable(nvml.status()));
  EXPECT_THAT(std::string(nvml.status().message()), HasSubstr("lacks a function"));
}

TEST(Nvml, ADeviceOfAnotherBusIsNotOurs) {
  const auto nvml = Nvml::Open(FAKE_NVML, "00000000:af:00.0");
  EXPECT_TRUE(absl::IsUnavailable(nvml.status()));
  EXPECT_THAT(std::string(nvml.status().message()), HasSubstr("does not know our device"));
}

TEST_F(NvmlFault, ADriverThatIsNotLoadedIsNamed) {
  Ask("init");
  const auto nvml = Nvml::Open(FAKE_NVML, kBusId);
  EXPECT_THAT(std::string(nvml.status().message()), HasSubstr("Driver Not Loaded"));
}

std::string ScrapeWith(std::unique_ptr<Nvml> nvml) {
  Metrics metrics;
  metrics.SetEngines({.version = "1", .models = {}},
                     [] { return std::vector<engine::EngineStats>(1); });
  metrics.AddGpu("cuda:1", std::move(nvml));
  return metrics.Scrape();
}

TEST(Nvml, AScrapeHasTheReading) {
  auto nvml = Nvml::Open(FAKE_NVML, kBusId);
  ASSERT_TRUE(nvml.ok()) << nvml.status();
  const std::string text = ScrapeWith(*std::move(nvml));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_gpu_memory_bytes{device="cuda:1",state="used"} 100000)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_gpu_memory_bytes{device="cuda:1",state="free"} 50000)"));
  EXPECT_THAT(text, HasSubstr(R"(fp8kvd_gpu_utilization_ratio{device="cuda:1"} 0.73)"));
}

TEST_F(NvmlFault, AScrapeGoesOnWithoutTheReading) {
  auto nvml = Nvml::Open(FAKE_NVML, kBusId);
  ASSERT_TRUE(nvml.ok()) << nvml.status();
  Ask("utilization");
  const std::string text = ScrapeWith(*std::move(nvml));
  EXPECT_THAT(text, Not(HasSubstr("fp8kvd_gpu_")));
  EXPECT_THAT(text, HasSubstr("fp8kvd_seqs 0\n"));
}

}  // namespace
}  // namespace fp8kvd::ops
