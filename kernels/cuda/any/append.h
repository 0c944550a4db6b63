// kernels/cuda/any/append.h: quantises new tokens and places them (kernels/params.h), on any
// architecture from sm_80 on. Queues one launch and returns; the caller checks shapes and pointers.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace fp8kvd::kernels::cuda {

// params.rows is device memory, and so is all that rows point to. `tiles_max` is the largest
// kv_heads * (16-token tiles that [pos, pos + n) touches) of a row; it sizes the grid, and rows
// that need more are still done whole. tables_settled: the launch before this one writes no table.
cudaError_t LaunchAppend(const AppendParams& params, int32_t tiles_max, bool tables_settled,
                         cudaStream_t stream);

}  // namespace fp8kvd::kernels::cuda
