#include "kernels/cuda/memory.h"

#include <cstring>
#include <string>

namespace fp8kvd::kernels::cuda {

absl::Status ToStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string text = std::string(what) + ": " + cudaGetErrorString(error);
  if (error == cudaErrorMemoryAllocation) return absl::ResourceExhaustedError(text);
  return absl::InternalError(text);
}

absl::StatusOr<DeviceBytes> AllocDevice(int64_t bytes) {
  void* memory = nullptr;
  const std::string what = "asked the device for " + std::to_string(bytes) + " bytes";
  absl::Status status = ToStatus(cudaMalloc(&memory, bytes), what.c_str());
  if (!status.ok()) {
    cudaGetLastError();  // not a fault: the next call must not see it
    return status;
  }
  DeviceBytes owner(static_cast<uint8_t*>(memory));
  status = ToStatus(cudaMemset(memory, 0, bytes), "zeroing device memory");
  if (!status.ok()) return status;
  return owner;
}

absl::StatusOr<PinnedBytes> AllocPinned(int64_t bytes) {
  void* memory = nullptr;
  const std::string what = "asked for " + std::to_string(bytes) + " bytes of pinned memory";
  const absl::Status status = ToStatus(
      cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable), what.c_str());
  if (!status.ok()) {
    cudaGetLastError();
    return status;
  }
  std::memset(memory, 0, bytes);
  return PinnedBytes(static_cast<uint8_t*>(memory));
}

}  // namespace fp8kvd::kernels::cuda
