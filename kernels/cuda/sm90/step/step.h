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
  static int32_t Shared(const LaunchShape& shape);
  static const void* Kernel(int32_t rows);
};

}  // namespace fp8kvd::kernels::cuda::sm90
