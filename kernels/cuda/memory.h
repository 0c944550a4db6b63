// kernels/cuda/memory.h: device and pinned memory as owning types. Movable, freed with the owner.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include <cuda_runtime_api.h>

namespace fp8kvd::kernels::cuda {

// The one place where a cudaError_t becomes a Status: RESOURCE_EXHAUSTED for want of memory,
// INTERNAL for anything else. `what` says what was being done.
absl::Status ToStatus(cudaError_t error, const char* what);

struct FreeDevice {
  void operator()(uint8_t* bytes) const { cudaFree(bytes); }
};
struct FreePinned {
  void operator()(uint8_t* bytes) const { cudaFreeHost(bytes); }
};
using DeviceBytes = std::unique_ptr<uint8_t, FreeDevice>;
// Host memory at one address for the host and the device.
using PinnedBytes = std::unique_ptr<uint8_t, FreePinned>;

// Zeroed.
absl::StatusOr<DeviceBytes> AllocDevice(int64_t bytes);
absl::StatusOr<PinnedBytes> AllocPinned(int64_t bytes);

}  // namespace fp8kvd::kernels::cuda
