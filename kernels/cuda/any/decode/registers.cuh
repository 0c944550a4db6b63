// kernels/cuda/any/decode/registers.cuh: what a warp of a decode kernel holds.
#pragma once

#include <cstdint>

#include "kernels/cuda/any/decode/traits.h"
#include "kernels/cuda/any/ptx.cuh"
#include "kernels/host_device.h"

namespace fp8kvd::kernels::cuda {

// The origin of no scores. Finite, so that differences are never NaN; scores of rows within the
// range that the host allows are below 2^70.
inline constexpr float kEmptyMax = -1e30F;

// Fragments of mma's B, where columns are N: of N tile n and chunk c the two k-steps' registers. Of
// its A, where they are M: of both column halves of M tile n / 2 the k-step n % 2. In fp8_kv f16,
// and the query times 1 / down (MakeOperand).
template <class T, bool kShared = T::kQueryInShared>
struct Query {
  float down = 1.0F;
  uint4 b[T::kNTiles][(T::kDimTiles + 1) / 2];

  __device__ __forceinline__ explicit Query(uint4*) {}
  __device__ __forceinline__ void Set(int32_t n, int32_t c, uint4 x) { b[n][c] = x; }
  __device__ __forceinline__ uint4 Get(int32_t n, int32_t c) const { return b[n][c]; }
};

// The same in shared memory, each lane its own: `lanes` is [kNTiles][chunks][32].
template <class T>
struct Query<T, true> {
  float down = 1.0F;
  uint4* lanes;

  __device__ __forceinline__ explicit Query(uint4* shared)
      : lanes(shared + threadIdx.x % kWarpLanes) {}
  __device__ __forceinline__ uint4* At(int32_t n, int32_t c) const {
    return lanes + (n * ((T::kDimTiles + 1) / 2) + c) * kWarpLanes;
  }
  __device__ __forceinline__ void Set(int32_t n, int32_t c, uint4 x) { *At(n, c) = x; }
  __device__ __forceinline__ uint4 Get(int32_t n, int32_t c) const { return *At(n, c); }
};

// Of a lane's columns, two in each of kTiles: the output's raw sums, the lane's share of the
// denominator, and the origin: weights are 2^(score - origin), scores in units of log2, none more
// than kScoreMax above it (PlaceOrigins). fp8_kv: v_up is the power of two that o is scaled up by
// (PlaceVUp); 0: no tile was seen.
template <int32_t kTiles, int32_t kDimTiles>
struct Sums {
  static constexpr int32_t kColumnTiles = kTiles;
  float o[kTiles][kDimTiles][4];
  float origin[kTiles][2];
  float sum[kTiles][2];
  float v_up;

  // 1 / v_up, or so large that 0 stays 0.
  __device__ __forceinline__ float VDown() const {
    return __uint_as_float((254U << 23) - __float_as_uint(v_up));
  }

  __device__ __forceinline__ void Clear() {
    v_up = 0.0F;
#pragma unroll
    for (int32_t n = 0; n < kTiles; ++n) {
      origin[n][0] = origin[n][1] = kEmptyMax;
      sum[n][0] = sum[n][1] = 0.0F;
#pragma unroll
      for (int32_t d = 0; d < kDimTiles; ++d) {
#pragma unroll
        for (int32_t i = 0; i < 4; ++i) o[n][d][i] = 0.0F;
      }
    }
  }
};

// Columns are N of mma and dimensions M.
template <class T, bool kColumnsAreM = T::kColumnsAreM>
struct Accumulator : Sums<T::kNTiles, T::kDimTiles> {
  using Traits = T;
  static constexpr int32_t kLanesStep = 4;  // between lanes that hold the same columns
  static constexpr int32_t kLanesEnd = kWarpLanes;

  __device__ __forceinline__ static int32_t Column(int32_t n, int32_t i, int32_t lane) {
    return 8 * n + 2 * (lane % 4) + i;
  }
  // Of those that hold the same column, this lane says what belongs to it as a whole.
  __device__ __forceinline__ static bool SpeaksForColumns(int32_t lane) { return lane / 4 == 0; }
};

// Columns are M of mma and dimensions N: lane (g, t) has columns g and g + 8 of each M tile.
template <class T>
struct Accumulator<T, true> : Sums<T::kNTiles / 2, 2 * T::kDimTiles> {
  using Traits = T;
  static constexpr int32_t kLanesStep = 1;
  static constexpr int32_t kLanesEnd = 4;

  __device__ __forceinline__ static int32_t Column(int32_t n, int32_t i, int32_t lane) {
    return 16 * n + lane / 4 + 8 * i;
  }
  __device__ __forceinline__ static bool SpeaksForColumns(int32_t lane) { return lane % 4 == 0; }
};

inline constexpr float kLog2E = 1.4426950408889634F;
inline constexpr float kFloatMax = 0x1.FFFFFEp127F;
inline constexpr float kLn2 = 0.6931471805599453F;

// 2^exponent for |exponent| < 127.
FP8KVD_HOST_DEVICE constexpr float PowerOfTwo(int32_t exponent) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(127 + exponent) << 23);
}

}  // namespace fp8kvd::kernels::cuda
