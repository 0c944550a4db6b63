// kernels/cuda/step_launches.h: an append of one token a row and the decode after it as one launch,
// whose kernel fetches queries and tokens and writes results over the bus itself. For steps so
// short that a second launch would show.
// Threads: one caller at a time. Cost: no allocation.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include <cuda_runtime_api.h>

#include "kernels/cuda/fences.h"
#include "kernels/cuda/launch_shape.h"
#include "kernels/cuda/step_inputs.h"
#include "kernels/cuda/writes.h"

namespace fp8kvd::kernels::cuda {

class StepLaunches {
 public:
  StepLaunches(StepInputs* inputs, Writes* writes, Fences* fences)
      : inputs_(inputs), writes_(writes), fences_(fences) {}

  // sm: 80 or 90, the rows of the table that are used.
  void Init(int32_t sm, const DeviceLimits& limits, cudaStream_t stream);

  // Queues rows and what inputs has kept back for them, and marks the next fence. False: there is
  // no kernel for such rows, or a longer way is as fast; then nothing is queued.
  absl::StatusOr<bool> Run(absl::Span<const DecodeRow> rows, const DecodeParams& params);

 private:
  StepInputs* const inputs_;
  Writes* const writes_;
  Fences* const fences_;
  int32_t sm_ = 80;
  DeviceLimits limits_{};
  cudaStream_t stream_ = nullptr;
  // The rows' sequences and layers, by table and base; room for kItemsMax.
  std::vector<std::pair<const int32_t*, const uint8_t*>> places_;
};

}  // namespace fp8kvd::kernels::cuda
