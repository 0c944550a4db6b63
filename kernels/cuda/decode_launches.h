// kernels/cuda/decode_launches.h: from rows on the device to decode launches: which kernel, what
// shape, how many launches; and the workspace that they share, one after the other.
// Does not manage: how queries come and results leave (step_inputs.h, step_outputs.h).
// Threads: one caller at a time. Cost: no allocation after Prepare.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include <cuda_runtime_api.h>

#include "kernels/backend.h"
#include "kernels/cuda/decode_table.h"
#include "kernels/cuda/fences.h"
#include "kernels/cuda/launch_shape.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/step_inputs.h"
#include "kernels/cuda/step_path.h"
#include "kernels/cuda/writes.h"

namespace fp8kvd::kernels::cuda {

class DecodeLaunches {
 public:
  DecodeLaunches(StepInputs* inputs, Writes* writes, Fences* fences)
      : inputs_(inputs), writes_(writes), fences_(fences) {}

  // sm: 80 or 90, the rows of the table that are used.
  void Init(int32_t sm, const DeviceLimits& limits, cudaStream_t stream);
  // As Backend::WarmUp, but runs nothing. Adds what it takes to *allocations.
  absl::Status Prepare(absl::Span<const KernelShape> shapes, int32_t q_len_max, int32_t q_heads_max,
                       int64_t* allocations);

  // UNIMPLEMENTED names the shapes that there are.
  absl::Status CheckShape(const KernelShape& shape) const;
  // may_mark: a launch that is the only one may mark the next fence.
  absl::Status Run(absl::Span<const DecodeRow> rows, const DecodeParams& params, StepPath path,
                   bool may_mark);

 private:
  // What a row of batch_invariant is done with. It follows from the row alone, and rows that go one
  // way go together.
  struct RowWay {
    const DecodeKernel* kernel;
    int32_t pairs_alone;  // launch_shape.h

    bool operator==(const RowWay&) const = default;
  };
  struct RowLength {
    int32_t units;
    int32_t index;
  };
  absl::Status RunInvariant(absl::Span<const DecodeRow> rows, const DecodeParams& params,
                            StepPath path);
  // Items of a launch; with `cut` (batch_invariant, no pairs alone) each leaves a piece.
  int64_t ItemsMax(const DecodeKernel& kernel, bool cut) const;
  // How many rows from the front one launch takes; at least one.
  int64_t RowsOfLaunch(absl::Span<const DecodeRow> rows, const DecodeParams& params,
                       const DecodeKernel& kernel, bool cut) const;
  // The appends that inputs left for the rows, taken from the front, to tokens_.
  void TakeTokens(absl::Span<const DecodeRow> rows, absl::Span<const AppendRow>& appends);
  // tokens_ as the launch's.
  absl::Status AddTokens(DecodeArgs& args);
  // The rows, and tokens_ with them, in another order, until the next call.
  absl::Span<const DecodeRow> LongestFirst(absl::Span<const DecodeRow> rows, int32_t group,
                                           Grain grain);
  absl::Status DecodeRows(absl::Span<const DecodeRow> rows, const DecodeParams& params,
                          const DecodeKernel& kernel, StepPath path, bool may_mark);

  StepInputs* const inputs_;
  Writes* const writes_;
  Fences* const fences_;
  int32_t sm_ = 80;
  DeviceLimits limits_{};
  cudaStream_t stream_ = nullptr;

  DeviceBytes pieces_;
  int64_t piece_floats_ = 0;            // room in pieces_
  DeviceBytes piece_flags_;             // behind the launches' progress
  std::vector<RowWay> row_ways_;        // room for kItemsMax
  std::vector<DecodeRow> sorted_rows_;  // the same
  std::vector<RowLength> lengths_;      // the same
  std::vector<NewToken> tokens_;        // the same; one for each row of a launch
  std::vector<NewToken> sorted_tokens_;
};

}  // namespace fp8kvd::kernels::cuda
