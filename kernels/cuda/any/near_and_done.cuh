// kernels/cuda/any/near_and_done.cuh: the two ends of a decode launch that the host is waiting for:
// rows that came with it, and the words that say it is done.
#pragma once

#include <cstdint>

#include "kernels/cuda/decode_args.h"

namespace fp8kvd::kernels::cuda {

// near: the kernel's own parameter, which lives as long as the launch.
__device__ __forceinline__ DecodeArgs WithNearRows(const DecodeArgs& args, const NearRows& near) {
  DecodeArgs mine = args;
  if (args.near != nullptr) mine.rows = near.rows;
  return mine;
}

inline NearRows NearRowsOf(const DecodeArgs& args) {
  return args.near != nullptr ? *args.near : NearRows{};
}

// Every thread of every CTA calls it once, after its last store. Whoever sees the flag, or all of
// them, sees all that the launch stored.
__device__ __forceinline__ void SignalDone(const DoneMark& done) {
  if (done.flags == nullptr) return;
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence_system();
  uint64_t* flag = done.flags;
  if (done.arrivals == nullptr) {
    flag += blockIdx.x + gridDim.x * blockIdx.y;
  } else {
    const uint32_t others = gridDim.x * gridDim.y * gridDim.z - 1;
    // Counts to 0 again by itself.
    if (atomicInc(done.arrivals, others) != others) return;
    __threadfence_system();
  }
  *static_cast<volatile uint64_t*>(flag) = done.value;
}

}  // namespace fp8kvd::kernels::cuda
