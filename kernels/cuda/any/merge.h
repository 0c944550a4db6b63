// kernels/cuda/any/merge.h: the second half of a batch_invariant decode: joins the pieces that the
// decode kernel left of every pair with more than one item. Queues one launch and returns.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/decode_args.h"
#include "kernels/cuda/decode_work.h"

namespace fp8kvd::kernels::cuda {

// args: as of the decode launch just before. columns_max: the most query columns (q_len * q_heads)
// of a row; it sizes the grid.
cudaError_t LaunchMerge(const DecodeArgs& args, Precision precision, int32_t head_dim, Grain grain,
                        int32_t columns_max, cudaStream_t stream);

}  // namespace fp8kvd::kernels::cuda
