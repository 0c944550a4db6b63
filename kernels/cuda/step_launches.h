// kernels/cuda/step_launches.h: an append of one token a row and the decode after it as one launch,
// whose kernel fetches queries and tokens and writes results over the bus itself. For steps so
// short that a second launch would show. Few rows on an idle device go as a graph (kernel_graph.h).
// Threads: one caller at a time. Cost: no allocation after Prepare.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include <cuda_runtime_api.h>

#include "kernels/backend.h"
#include "kernels/cuda/decode_table.h"
#include "kernels/cuda/fences.h"
#include "kernels/cuda/kernel_graph.h"
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

  // Loads the kernels of the shapes and makes their graphs. Run takes no others.
  absl::Status Prepare(absl::Span<const KernelShape> shapes, int64_t* allocations);

  // Queues rows and what inputs has kept back for them, and marks the next fence. False: there is
  // no kernel for such rows, or a longer way is as fast; then nothing is queued.
  absl::StatusOr<bool> Run(absl::Span<const DecodeRow> rows, const DecodeParams& params);

 private:
  // Graphs by the number of rows and by the CTAs of a cluster (1, 2, 4, 8).
  static constexpr int32_t kGraphRowsMax = kStepRowsOf[1];
  static constexpr int32_t kClusters = 4;
  using Graphs = std::array<std::array<KernelGraph, kClusters>, kGraphRowsMax>;
  struct Prepared {
    const DecodeKernel* kernel;
    Graphs graphs;
  };

  absl::Status PrepareKernel(const DecodeKernel& kernel, int64_t* allocations);
  Prepared* Find(const DecodeParams& params);
  // Of kStepRowsMax rows at most, with the appends that are theirs, which it takes from the front.
  absl::Status Launch(Prepared& prepared, absl::Span<const DecodeRow> rows,
                      absl::Span<const AppendRow>& appends, const LaunchShape& shape,
                      const StepArgs& args, bool as_graph);

  StepInputs* const inputs_;
  Writes* const writes_;
  Fences* const fences_;
  int32_t sm_ = 80;
  DeviceLimits limits_{};
  cudaStream_t stream_ = nullptr;
  std::vector<std::unique_ptr<Prepared>> prepared_;
  NearStepRows<kStepRowsMax> near_{};  // of the launch that is being made
};

}  // namespace fp8kvd::kernels::cuda
