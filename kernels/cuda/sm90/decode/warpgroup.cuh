// kernels/cuda/sm90/decode/warpgroup.cuh: four warps that take their products together (wgmma), and
// how its B operand lies in shared memory.
#pragma once

#include <cstdint>

#include "kernels/cuda/any/ptx.cuh"
#include "kernels/cuda/sm90/decode/ring.cuh"

namespace fp8kvd::kernels::cuda {

inline constexpr int32_t kWarpgroupWarps = 4;
inline constexpr int32_t kWarpgroupThreads = kWarpgroupWarps * kWarpLanes;

__device__ __forceinline__ int32_t WarpOfWarpgroup() {
  return threadIdx.x / kWarpLanes % kWarpgroupWarps;
}
__device__ __forceinline__ bool SyncWarpgroupOr(bool mine) {
  return SyncThreadsOr(1 + threadIdx.x / kWarpgroupThreads, kWarpgroupThreads, mine);
}
__device__ __forceinline__ void SyncWarpgroup() { SyncWarpgroupOr(false); }

// The ring of a warpgroup: its first warp sets out the copies, all wait for them.
struct WarpgroupRing : BulkRing {
  static constexpr bool kPaces = false;

  // Not asked for each barrier: the compiler makes that a predicate, which racecheck does not see.
  static __device__ __forceinline__ bool MakesBarriers() { return WarpOfWarpgroup() == 0; }
  static __device__ __forceinline__ void Copy(uint8_t* to, const UnitSource& source, int32_t owner,
                                              int32_t lane, uint64_t* full) {
    if (WarpOfWarpgroup() == 0) BulkRing::Copy(to, source, owner, lane, full);
  }
  static __device__ __forceinline__ void BringNear(const UnitSource& source) {
    if (WarpOfWarpgroup() == 0) BulkRing::BringNear(source);
  }
};

// 16 rows (of K) and 32 columns (of N) of f16, what one wgmma multiplies with, in shared memory: 8
// x 8 matrices one after the other, each a column's 8 rows after the other's: those of the first 8
// rows, then those of the last.
struct OperandB {
  static constexpr int32_t kMatrixBytes = 128;
  static constexpr int32_t kRowsBytes = 4 * kMatrixBytes;  // of 8 rows
  static constexpr int32_t kBytes = 2 * kRowsBytes;

  // As wgmma wants it, in units of 16 bytes: the address and how far it is to the next 8 rows, and
  // to the next 8 columns.
  uint32_t low;
  static constexpr uint32_t kHigh = kMatrixBytes / 16;

  __device__ __forceinline__ explicit OperandB(const void* shared)
      : low(__shfl_sync(kAllLanes, SharedAddress(shared) / 16 | (kRowsBytes / 16) << 16, 0)) {}

  // The one so many further on.
  __device__ __forceinline__ OperandB Next(int32_t count) const {
    OperandB next = *this;
    next.low += count * (kBytes / 16);
    return next;
  }
};

// c += a b, or c = a b, for 64 rows of a: each warp has 16 of them in its registers, as for MmaF16,
// and gets those of c. c: of 8 columns each. All between Begin and End is under way at once; until
// End nothing of it may be touched.
class WarpgroupProducts {
 public:
  static __device__ __forceinline__ void Begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  }

  static __device__ __forceinline__ void Multiply(float (&c0)[4], float (&c1)[4], float (&c2)[4],
                                                  float (&c3)[4], const uint32_t* a,
                                                  const OperandB& b, bool adds) {
    asm volatile(
        "{.reg .pred p; .reg .b64 b; setp.ne.b32 p,%22,0; mov.b64 b,{%20,%21};"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15},{%16,%17,%18,%19},b,p,1,1,0;}"
        : "+f"(c0[0]), "+f"(c0[1]), "+f"(c0[2]), "+f"(c0[3]), "+f"(c1[0]), "+f"(c1[1]), "+f"(c1[2]),
          "+f"(c1[3]), "+f"(c2[0]), "+f"(c2[1]), "+f"(c2[2]), "+f"(c2[3]), "+f"(c3[0]), "+f"(c3[1]),
          "+f"(c3[2]), "+f"(c3[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.low), "n"(OperandB::kHigh),
          "r"(static_cast<int32_t>(adds)));
  }

  static __device__ __forceinline__ void End() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }
  // After End: the compiler may use c from here on, not sooner.
  static __device__ __forceinline__ void Receive(float (&c)[4]) {
#pragma unroll
    for (float& x : c) asm volatile("" : "+f"(x)::"memory");
  }
};

// Stores four 8 x 8 matrices of 16-bit values, held as one register a lane each, transposed, one
// after the other.
__device__ __forceinline__ void StoreTransposed(uint8_t* to, int32_t lane,
                                                const uint32_t (&rows)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(
                   SharedAddress(to + lane * 16)),
               "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3])
               : "memory");
}

// What this thread stored is what wgmma reads after the next barrier.
__device__ __forceinline__ void OrderStoresBeforeProducts() { BulkRing::OrderStoresBeforeCopies(); }

}  // namespace fp8kvd::kernels::cuda
