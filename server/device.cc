#include "server/device.h"

#include <sched.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "config/device_list.h"
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
// NOT_FOUND without a driver or device, INVALID_ARGUMENT for one that is not there.
absl::StatusOr<Device> MakeGpu(int32_t index) {
  kernels::cuda::CudaOptions cuda;
  cuda.device = index;
  absl::StatusOr<std::unique_ptr<kernels::Backend>> backend = kernels::cuda::MakeCudaBackend(cuda);
  if (!backend.ok()) return backend.status();
  Device device;
  device.name = absl::StrCat("cuda:", index);
  device.backend = std::move(*backend);
  return device;
}
#else
absl::StatusOr<Device> MakeGpu(int32_t) {
  return absl::NotFoundError(
      "this build has no CUDA backend; build where nvcc is, or use --device=cpu");
}
#endif

absl::StatusOr<Devices> MakeGpus(const std::vector<int32_t>& named) {
  Devices devices;
  for (const int32_t index : named) {
    absl::StatusOr<Device> gpu = MakeGpu(index);
    if (absl::IsInvalidArgument(gpu.status())) {
      return absl::UnavailableError(
          absl::StrCat("devices names GPU ", index,
                       ", which is not here; name those that nvidia-smi lists, "
                       "counted from 0, or none for all"));
    }
    if (!gpu.ok()) return gpu.status();
    devices.all.push_back(*std::move(gpu));
  }
  while (named.empty() && devices.all.size() < kDevicesMax) {
    absl::StatusOr<Device> gpu = MakeGpu(static_cast<int32_t>(devices.all.size()));
    if (absl::IsInvalidArgument(gpu.status()) && !devices.all.empty()) break;  // that was the last
    if (!gpu.ok()) return gpu.status();
    devices.all.push_back(*std::move(gpu));
  }
  return devices;
}

Devices MakeCpus(const config::EngineOptions& options, std::vector<int32_t> named) {
  if (named.empty()) named.push_back(0);
  const int32_t threads = options.cpu_threads > 0 ? options.cpu_threads : CoresAllowed();
  const auto count = static_cast<int32_t>(named.size());
  Devices devices;
  for (int32_t i = 0; i < count; ++i) {
    Device& device = devices.all.emplace_back();
    device.name = absl::StrCat("cpu:", named[static_cast<size_t>(i)]);
    const int32_t mine = threads / count + (i < threads % count ? 1 : 0);
    device.workers = std::make_unique<engine::WorkerPool>(std::max(1, mine));
    device.backend = std::make_unique<kernels::cpu::CpuBackend>(device.workers.get());
  }
  return devices;
}

}  // namespace

absl::StatusOr<Devices> MakeDevices(const config::EngineOptions& options) {
  const absl::StatusOr<std::vector<int32_t>> named = config::ParseDeviceList(options.devices);
  if (!named.ok()) return named.status();
  if (options.device == config::DeviceChoice::kCpu) return MakeCpus(options, *named);
  absl::StatusOr<Devices> gpus = MakeGpus(*named);
  if (gpus.ok()) return gpus;
  const absl::Status& why = gpus.status();
  if (options.device == config::DeviceChoice::kCuda) {
    return absl::UnavailableError(absl::StrCat("device is cuda: ", why.message()));
  }
  // auto: a machine without a GPU, or a build without CUDA, serves from the CPU. A GPU that is
  // there and cannot be used is an error: to fall back in silence would hide it.
  if (!absl::IsNotFound(why)) return why;
  Devices cpus = MakeCpus(options, *named);
  cpus.why_no_gpu = std::string(why.message());
  return cpus;
}

}  // namespace fp8kvd
