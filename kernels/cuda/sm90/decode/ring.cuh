// kernels/cuda/sm90/decode/ring.cuh: a unit travels as one bulk copy (cp.async.bulk), set out by
// one lane; its bytes are counted by the stage's barrier.
#pragma once

#include <cstdint>

#include "kernels/cuda/any/decode/work.cuh"
#include "kernels/cuda/any/ptx.cuh"

namespace fp8kvd::kernels::cuda {

struct BulkRing {
  static __device__ __forceinline__ void Init(uint64_t* full) {
    asm volatile("mbarrier.init.shared.b64 [%0],1;" ::"r"(SharedAddress(full)) : "memory");
  }
  static __device__ __forceinline__ void FenceInit() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }

  static __device__ __forceinline__ void Copy(uint8_t* to, const UnitSource& source, int32_t owner,
                                              int32_t lane, uint64_t* full) {
    if (lane != owner) return;
    const uint32_t barrier = SharedAddress(full);
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(barrier), "r"(source.bytes)
                 : "memory");
    if (source.bytes == 0) return;
    // Read once: rows, tables and pieces stay in the second-level cache instead. Volatile: made for
    // each copy, since kernels of many columns have no register to keep it in.
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0],[%1],%2,[%3],%4;" ::"r"(SharedAddress(to)),
        "l"(source.from), "r"(source.bytes), "r"(barrier), "l"(policy)
        : "memory");
  }

  // What this thread stored stays behind the copies that are set out after the warp's next barrier.
  static __device__ __forceinline__ void OrderStoresBeforeCopies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }

  static __device__ __forceinline__ void Wait(uint64_t* full, uint32_t phase) {
    uint32_t done = 0;
    while (done == 0) {
      asm volatile(
          "{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p,[%1],%2; selp.u32 %0,1,0,p;}"
          : "=r"(done)
          : "r"(SharedAddress(full)), "r"(phase)
          : "memory");
    }
  }
};

}  // namespace fp8kvd::kernels::cuda
