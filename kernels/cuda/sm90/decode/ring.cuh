// kernels/cuda/sm90/decode/ring.cuh: a unit travels as one bulk copy (cp.async.bulk), set out by
// one lane; its bytes are counted by the stage's barrier.
#pragma once

#include <cstdint>

#include "kernels/cuda/any/decode/work.cuh"
#include "kernels/cuda/any/ptx.cuh"

namespace fp8kvd::kernels::cuda {

struct BulkRing {
  static constexpr bool kPaces = true;
  static constexpr bool kBringsNear = true;

  static __device__ __forceinline__ bool MakesBarriers() { return true; }
  static __device__ __forceinline__ void Init(uint64_t* full) {
    asm volatile("mbarrier.init.shared.b64 [%0],1;" ::"r"(SharedAddress(full)) : "memory");
  }
  static __device__ __forceinline__ void FenceInit() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }

  static __device__ __forceinline__ void Copy(uint8_t* to, const UnitSource& source, int32_t owner,
                                              int32_t lane, uint64_t* full) {
    if (lane != owner) return;
    Expect(source.bytes, full);
    if (source.bytes == 0) return;
    // Read once: rows, tables and pieces stay in the second-level cache instead. Volatile: made for
    // each copy, since kernels of many columns have no register to keep it in.
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0],[%1],%2,[%3],%4;" ::"r"(SharedAddress(to)),
        "l"(source.from), "r"(source.bytes), "r"(SharedAddress(full)), "l"(policy)
        : "memory");
  }

  // Into the second-level cache alone.
  static __device__ __forceinline__ void BringNear(const UnitSource& source) {
    if (source.bytes == 0) return;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0],%1;" ::"l"(source.from), "r"(source.bytes)
                 : "memory");
  }

  // So many bytes are to come in all, and then they may be used.
  static __device__ __forceinline__ void Expect(int32_t bytes, uint64_t* full) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(SharedAddress(full)),
                 "r"(bytes)
                 : "memory");
  }
  // Some of them, of any kind of memory.
  static __device__ __forceinline__ void Bring(void* to, const void* from, int32_t bytes,
                                               uint64_t* full) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::
            "r"(SharedAddress(to)),
        "l"(from), "r"(bytes), "r"(SharedAddress(full))
        : "memory");
  }
  // The same to all CTAs of the cluster, at the same place, where all have this barrier.
  static __device__ __forceinline__ void BringToCluster(void* to, const void* from, int32_t bytes,
                                                        uint64_t* full, int32_t cluster) {
    const auto ctas = static_cast<uint16_t>((1U << cluster) - 1U);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0],[%1],%2,[%3],%4;" ::"r"(SharedAddress(to)),
        "l"(from), "r"(bytes), "r"(SharedAddress(full)), "h"(ctas)
        : "memory");
  }

  // What this thread stored stays behind the copies that are set out after the warp's next barrier.
  static __device__ __forceinline__ void OrderStoresBeforeCopies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }

  // What this thread stored to global memory is what copies bring that are set out after the warp's
  // next barrier.
  static __device__ __forceinline__ void OrderStoresBeforeCopiesOfThem() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
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
