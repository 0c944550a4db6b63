// bench/gpu_roof.h: how fast this device reads its memory when nothing else is asked of it: what
// every decode is held against.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace fp8kvd::bench {

// Queues one read of `bytes` (a multiple of 16 KiB) by bulk copies, as the Hopper kernels read.
cudaError_t LaunchRead(const uint8_t* from, int64_t bytes, uint32_t* sink, cudaStream_t stream);

}  // namespace fp8kvd::bench
