// kernels/cuda/sm80/decode/ring.cuh: a unit travels as 16-byte copies (cp.async) set out by all
// lanes; each lane arrives at the stage's barrier when its own have landed. Instructions of sm_80
// only.
#pragma once

#include <cstdint>

#include "kernels/cuda/any/decode/work.cuh"
#include "kernels/cuda/any/ptx.cuh"

namespace fp8kvd::kernels::cuda {

struct LaneRing {
  static constexpr bool kPaces = false;       // a check would wait for the ring's own copies
  static constexpr bool kBringsNear = false;  // takes an instruction of sm_90

  static __device__ __forceinline__ bool MakesBarriers() { return true; }
  static __device__ __forceinline__ void Init(uint64_t* full) {
    asm volatile("mbarrier.init.shared.b64 [%0],32;" ::"r"(SharedAddress(full)) : "memory");
  }
  static __device__ __forceinline__ void FenceInit() {}

  static __device__ __forceinline__ void Copy(uint8_t* to, const UnitSource& source, int32_t owner,
                                              int32_t lane, uint64_t* full) {
    const uint64_t from = __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(source.from), owner);
    const int32_t bytes = __shfl_sync(kAllLanes, source.bytes, owner);
    const uint32_t target = SharedAddress(to);
    for (int32_t i = lane * 16; i < bytes; i += kWarpLanes * 16) {
      asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(target + i), "l"(from + i)
                   : "memory");
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(SharedAddress(full))
                 : "memory");
  }

  static __device__ __forceinline__ void OrderStoresBeforeCopies() {}  // they are of one kind
  static __device__ __forceinline__ void OrderStoresBeforeCopiesOfThem() {}

  static __device__ __forceinline__ void Wait(uint64_t* full, uint32_t phase) {
    uint32_t done = 0;
    while (done == 0) {
      asm volatile(
          "{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p,[%1],%2; selp.u32 %0,1,0,p;}"
          : "=r"(done)
          : "r"(SharedAddress(full)), "r"(phase)
          : "memory");
    }
  }
};

}  // namespace fp8kvd::kernels::cuda
