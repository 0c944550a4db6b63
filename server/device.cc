#include "server/device.h"

#include <sched.h>

#include "kernels/cpu/backend.h"
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

}  // namespace

absl::StatusOr<Device> MakeDevice(const config::EngineOptions& options) {
  if (options.device == config::DeviceChoice::kCuda) {
    return absl::UnavailableError(
        "device is cuda, this build has no CUDA backend; build where nvcc is, or set device to cpu "
        "or auto");
  }
  Device device;
  device.workers = std::make_unique<engine::WorkerPool>(
      options.cpu_threads > 0 ? options.cpu_threads : CoresAllowed());
  device.backend = std::make_unique<kernels::cpu::CpuBackend>(device.workers.get());
  return device;
}

}  // namespace fp8kvd
