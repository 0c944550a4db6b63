// The CPU's and the GPU's kernels on the same cases: each is within its bounds of the right answer
// elsewhere, here they are within 4e-3 of each other (relative L2). Skipped without a GPU.
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "config/base/limits.h"
#include "kernels/cuda/backend.h"
#include "tests/kernels/backend_device.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/cpu_ready.h"
#include "tests/kernels/run_case.h"

namespace fp8kvd::kernels::cuda {
namespace {

constexpr double kDifferenceMax = 4e-3;

double RelativeL2(const std::vector<float>& x, const std::vector<float>& y) {
  double difference = 0.0;
  double norm = 0.0;
  for (size_t i = 0; i < y.size(); ++i) {
    const double d = static_cast<double>(x[i]) - static_cast<double>(y[i]);
    difference += d * d;
    norm += static_cast<double>(y[i]) * static_cast<double>(y[i]);
  }
  return std::sqrt(norm > 0.0 ? difference / norm : difference);
}

TEST(AgainstCpu, BothSetsOfKernelsAgreeOnEveryShortCase) {
  for (const bool generic : {false, true}) {
    CudaOptions options;
    options.generic_kernels = generic;
    auto gpu = MakeCudaBackend(options);
    if (!gpu.ok()) GTEST_SKIP() << gpu.status().message();
    ASSERT_TRUE((*gpu)->WarmUp(cpu::AllShapes(), kItemsMax, kQLenMax, /*q_heads_max=*/256).ok());
    cpu::ReadyCpu cpu(2);
    const cases::BackendDevice::Sizes sizes = {int64_t{512} << 20, 1 << 20, int64_t{256} << 20};
    cases::BackendDevice gpu_device(**gpu, sizes);
    cases::BackendDevice cpu_device(cpu.backend, sizes);
    for (const cases::Case& c : cases::Cases(cases::Set::kShort)) {
      const std::vector<cases::RowData> data = cases::MakeData(c);
      cases::Answer of_gpu;
      cases::Answer of_cpu;
      ASSERT_EQ(cases::Launch(gpu_device, c, data, cases::Unseen::kPoison, &of_gpu), "");
      ASSERT_EQ(cases::Launch(cpu_device, c, data, cases::Unseen::kPoison, &of_cpu), "");
      ASSERT_EQ(of_gpu.out.size(), of_cpu.out.size());
      EXPECT_LE(RelativeL2(of_gpu.out, of_cpu.out), kDifferenceMax) << c.name;
    }
  }
}

}  // namespace
}  // namespace fp8kvd::kernels::cuda
