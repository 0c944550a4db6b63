// kernels/cuda/backend.h: kernels::Backend on one CUDA device. Launches go over one stream; staging
// memory is pinned host memory whose bytes kernels or the copy engines fetch and bring back
// (step_path.h); tables and pools are device memory. Every call queues and returns; nothing here
// waits for the device but WarmUp, Read, Write, and a caller that is tens of launches ahead of it.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/cuda/step_path.h"

namespace fp8kvd::kernels::cuda {

struct CudaOptions {
  int32_t device = 0;
  // Runs the kernels that need nothing newer than sm_80, also where the device has its own.
  bool generic_kernels = false;
  // Where warpgroups share a multiprocessor, one has it alone: for tools that lose track of the
  // others' barriers (docs/performance.md, Sanitizers).
  bool one_warpgroup = false;
  StepLimits step;
};

// NOT_FOUND without a driver or device, INVALID_ARGUMENT for a device that is not among those here,
// UNIMPLEMENTED for one older than sm_80.
absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaOptions& options);

}  // namespace fp8kvd::kernels::cuda
