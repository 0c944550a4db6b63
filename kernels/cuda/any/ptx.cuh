// kernels/cuda/any/ptx.cuh: the machine instructions that CUDA C++ has no word for, each as a
// function with its name in plain English. Nothing here knows attention.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/any/warp.h"

namespace fp8kvd::kernels::cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// c += a b with a [16, 16] row-major, b [16, 8] column-major, both bf16 or both f16, in the
// fragments of mma.m16n8k16: lane 4 g + t holds a's rows g and g + 8, b's column g, c's columns 2t
// and 2t + 1.
__device__ __forceinline__ void MmaBf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                        uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void MmaF16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                       uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Transposes an 8 x 8 matrix of 16-bit values held as one register a lane.
__device__ __forceinline__ uint32_t Transpose8x8(uint32_t rows) {
  uint32_t columns;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(columns) : "r"(rows));
  return columns;
}

// 2^x; 0 for -inf, results below 2^-126 are 0.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to one or two units in the last place; 0 for infinity.
__device__ __forceinline__ float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t PackF16(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Of two bf16 in a register.
__device__ __forceinline__ uint32_t MaxOfMagnitudes(uint32_t a, uint32_t b) {
  const __nv_bfloat162 max = __hmax2(__habs2(*reinterpret_cast<const __nv_bfloat162*>(&a)),
                                     __habs2(*reinterpret_cast<const __nv_bfloat162*>(&b)));
  return *reinterpret_cast<const uint32_t*>(&max);
}
__device__ __forceinline__ uint32_t MaxOfPairs(uint32_t a, uint32_t b) {
  const __nv_bfloat162 max = __hmax2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                     *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&max);
}
__device__ __forceinline__ float LowValue(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float HighValue(uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000U);
}
inline constexpr uint32_t kNoSigns = 0x7FFF7FFFU;

// A barrier of so many threads of the CTA, whole warps; whether any of them says so. Barrier 0 is
// __syncthreads.
__device__ __forceinline__ bool SyncThreadsOr(int32_t barrier, int32_t threads, bool mine) {
  int32_t any;
  asm volatile(
      "{.reg .pred p, q; setp.ne.b32 p,%3,0; bar.red.or.pred q,%1,%2,p; selp.b32 %0,1,0,q;}"
      : "=r"(any)
      : "r"(barrier), "r"(threads), "r"(static_cast<int32_t>(mine))
      : "memory");
  return any != 0;
}

// Copies kBytes (8 or 16) from global to shared memory while the thread goes on.
template <int32_t kBytes>
__device__ __forceinline__ void CopyAsync(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0],[%1],%2;" ::"r"(SharedAddress(to)), "l"(from),
               "n"(kBytes)
               : "memory");
}
// 16 bytes, past the first-level cache: for what other CTAs of this launch wrote.
__device__ __forceinline__ void CopyAsyncPastL1(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(SharedAddress(to)), "l"(from)
               : "memory");
}
// Until all of this thread's copies have landed.
__device__ __forceinline__ void WaitForCopies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Adds 1 to a counter, or makes it 0 where it was at `last`.
__device__ __forceinline__ void CountUpTo(uint32_t* counter, uint32_t last) {
  asm volatile("red.relaxed.gpu.global.inc.u32 [%0],%1;" ::"l"(counter), "r"(last) : "memory");
}

// Raises a flag that is 0. Who sees it sees all that this thread knew of.
__device__ __forceinline__ void RaiseFlag(uint32_t* flag) {
  asm volatile("st.release.gpu.global.u32 [%0],1;" ::"l"(flag) : "memory");
}
// Waits until another CTA has raised the flag, and takes it down for the next launch.
__device__ __forceinline__ void AwaitFlag(uint32_t* flag) {
  uint32_t raised = 0;
  while (raised == 0) {
    asm volatile("ld.acquire.gpu.global.u32 %0,[%1];" : "=r"(raised) : "l"(flag) : "memory");
  }
  *flag = 0;
}

// Programmatic dependent launch: a kernel may start while those before it run, once each of them
// has let it, and does by itself what reads nothing of theirs; after its wait all of them are
// complete. A kernel that waits before it lets the next one start (as the first reader after a
// writer does) makes sure that whatever comes later starts after what came before it. Before sm_90
// both do nothing.
__device__ __forceinline__ void WaitForPreviousLaunch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void LetNextLaunchStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace fp8kvd::kernels::cuda
