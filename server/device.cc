#include "server/device.h"

#include <sched.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "kernels/cpu/backend.h"
#if FP8KVD_WITH_CUDA
#include "kernels/cuda/backend.h"
#endif
#include "server/engine/worker_pool.h"

namespace fp8kvd {
namespace {

// Cores that this process may use.
int32_t CoresAllowed() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return 1;
  return CPU_COUNT(&cores) < 1 ? 1 : CPU_COUNT(&cores);
}

#if FP8KVD_WITH_CUDA
// NOT_FOUND without a driver or device.
absl::StatusOr<Device> MakeGpu(const config::EngineOptions& options) {
  kernels::cuda::CudaOptions cuda;
  cuda.device = options.device_index;
  absl::StatusOr<std::unique_ptr<kernels::Backend>> backend = kernels::cuda::MakeCudaBackend(cuda);
  if (!backend.ok()) return backend.status();
  Device device;
  device.backend = std::move(*backend);
  return device;
}
#else
absl::StatusOr<Device> MakeGpu(const config::EngineOptions&) {
  return absl::NotFoundError(
      "this build has no CUDA backend; build where nvcc is, or use --device=cpu");
}
#endif

Device MakeCpu(const config::EngineOptions& options) {
  Device device;
  device.workers = std::make_unique<engine::WorkerPool>(
      options.cpu_threads > 0 ? options.cpu_threads : CoresAllowed());
  device.backend = std::make_unique<kernels::cpu::CpuBackend>(device.workers.get());
  return device;
}

}  // namespace

absl::StatusOr<Device> MakeDevice(const config::EngineOptions& options) {
  if (options.device == config::DeviceChoice::kCpu) return MakeCpu(options);
  absl::StatusOr<Device> gpu = MakeGpu(options);
  if (gpu.ok()) return gpu;
  const absl::Status& why = gpu.status();
  if (options.device == config::DeviceChoice::kCuda) {
    return absl::UnavailableError(absl::StrCat("device is cuda: ", why.message()));
  }
  // auto: a machine without a GPU, or a build without CUDA, serves from the CPU. A GPU that is
  // there and cannot be used is an error: to fall back in silence would hide it.
  if (!absl::IsNotFound(why)) return why;
  Device cpu = MakeCpu(options);
  cpu.why_no_gpu = std::string(why.message());
  return cpu;
}

}  // namespace fp8kvd
