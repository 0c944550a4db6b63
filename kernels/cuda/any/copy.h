// kernels/cuda/any/copy.h: page copies and block table entries. Each queues one launch and returns,
// or none where there is nothing to do.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace fp8kvd::kernels::cuda {

// copies: [count] in device memory; bytes are multiples of 16, at most bytes_max.
cudaError_t LaunchCopyPages(const PageCopy* copies, int32_t count, int64_t bytes_max,
                            cudaStream_t stream);

// edits: [count] in device memory, no two of the same place.
cudaError_t LaunchTableEdits(const TableEdit* edits, int32_t count, cudaStream_t stream);

// The same for a few edits that travel with the launch.
struct NearEdits {
  static constexpr int32_t kMax = 64;
  TableEdit edits[kMax];
};
cudaError_t LaunchNearEdits(const NearEdits& near, int32_t count, cudaStream_t stream);

}  // namespace fp8kvd::kernels::cuda
