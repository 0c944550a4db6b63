// kernels/cuda/step_outputs.h: results that the copy engine takes to the host, beside the launches
// that follow. Threads: one caller at a time. Cost: no allocation once Init is done.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include <cuda_runtime_api.h>

#include "kernels/cuda/staging_twins.h"
#include "kernels/cuda/step_inputs.h"

namespace fp8kvd::kernels::cuda {

class StepOutputs {
 public:
  explicit StepOutputs(const StagingTwins* twins) : twins_(twins) {}
  ~StepOutputs();
  StepOutputs(const StepOutputs&) = delete;
  StepOutputs& operator=(const StepOutputs&) = delete;

  absl::Status Init(cudaStream_t stream);

  // Lists what the rows write; out_ranges of StepSize.
  int32_t List(absl::Span<const DecodeRow> rows, const DecodeParams& params);
  // Makes the rows write to the twins, and copies those out once what is queued so far is done.
  // False if they have none; then nothing has changed. CopyOut: of the rows of the last Turn.
  bool Turn(absl::Span<DecodeRow> rows, const DecodeParams& params);
  absl::Status CopyOut();

  // The stream on which all is done that was queued on either.
  absl::StatusOr<cudaStream_t> Join();

 private:
  absl::Status FollowStream();

  const StagingTwins* const twins_;
  cudaStream_t stream_ = nullptr;
  cudaStream_t copies_ = nullptr;
  cudaEvent_t queued_ = nullptr;
  HostRanges ranges_;
  bool has_copies_ = false;  // since the last Join
};

}  // namespace fp8kvd::kernels::cuda
