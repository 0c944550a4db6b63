// kernels/cuda/sm90/step/step.h: the kernel that is a whole step: it brings queries and new tokens
// from the host, appends, decodes, and leaves the results with the host. For steps so short that a
// second launch would show. sm90/decode/inst has the instantiations.
#pragma once

#include "kernels/cuda/step_args.h"

namespace fp8kvd::kernels::cuda::sm90 {

// For rows of one query token and up to kStepColumnsMax query heads a KV head, with equally many
// KV heads.
template <Precision precision, int32_t head_dim>
struct Step {
  static cudaError_t Prepare(int32_t shared_bytes);
  static int32_t Shared(const LaunchShape& shape);  // bytes of a CTA
  static cudaError_t Launch(const StepArgs& args, const NearStepRows& rows,
                            const LaunchShape& shape, cudaStream_t stream);
};

}  // namespace fp8kvd::kernels::cuda::sm90
