// kernels/cuda/any/decode/tile.cuh: one warp, one or more tiles in shared memory: scores, softmax
// and P V, all in registers. Tokens are M and query columns N of mma.m16n8k16, so a group of 8
// wastes nothing; the scores come out as the A-like fragment of P, and one transposition of 8 x 8 a
// register makes them the B operand of V P.
#pragma once

#include <cstdint>

#include "kernels/cuda/any/decode/registers.cuh"
#include "kernels/cuda/any/expand.cuh"
#include "kernels/cuda/any/ptx.cuh"

namespace fp8kvd::kernels::cuda {

// What turns products into scores in units of log2.
struct ScoreTerms {
  float factor;        // sm_scale * log2(e), and what the exponents of codes and query leave over
  float cap;           // softcap * log2(e); 0: off
  float two_over_cap;  // 2 / softcap
};

// Which keys a column of a pair sees. The query token of a column is `later` positions after pos.
struct Visibility {
  int32_t key_first;  // of query token 0; far below 0 without a window
  int32_t key_end;
  int32_t later_max;  // of the row
  int32_t group_inverse;
  int32_t column_first;  // of the pair

  __device__ __forceinline__ int32_t Later(int32_t column) const {
    return ((column_first + column) * group_inverse) >> 16;
  }
};

// A unit's scores need no mask from the first of these tokens up to the second.
__device__ __forceinline__ int2 SeenByAll(const DecodeRow& row) {
  return {row.window == 0 ? 0 : row.pos + row.q_len - row.window, row.pos + 1};
}

__device__ __forceinline__ Visibility VisibilityOf(const DecodeRow& row, int32_t group_inverse,
                                                   int32_t column_first) {
  constexpr int32_t kBeforeAll = -(1 << 30);
  Visibility seen;
  seen.key_first = row.window == 0 ? kBeforeAll : row.pos - row.window + 1;
  seen.key_end = row.pos + 1;
  seen.later_max = row.q_len - 1;
  seen.group_inverse = group_inverse;
  seen.column_first = column_first;
  return seen;
}

// acc += tile's K of one chunk times the query.
template <class T>
__device__ __forceinline__ void ChunkScores(const uint8_t* k, int32_t chunk, int32_t lane,
                                            const Query<T>& q, float (&even)[T::kNTiles][4],
                                            float (&odd)[T::kNTiles][4]) {
  if constexpr (T::kFp8) {
    const uint4 x = reinterpret_cast<const uint4*>(k)[chunk * kWarpLanes + lane];
    const uint32_t a[8] = {ExpandA(x.x), ExpandA(x.z), ExpandB(x.x), ExpandB(x.z),
                           ExpandA(x.y), ExpandA(x.w), ExpandB(x.y), ExpandB(x.w)};
#pragma unroll
    for (int32_t n = 0; n < T::kNTiles; ++n) {
      const uint4 b = q.Get(n, chunk);
      Mma(even[n], a[0], a[1], a[2], a[3], b.x, b.y);
      Mma(odd[n], a[4], a[5], a[6], a[7], b.z, b.w);
    }
  } else {
    const uint4 x = reinterpret_cast<const uint4*>(k)[(2 * chunk) * kWarpLanes + lane];
    const uint4 y = reinterpret_cast<const uint4*>(k)[(2 * chunk + 1) * kWarpLanes + lane];
#pragma unroll
    for (int32_t n = 0; n < T::kNTiles; ++n) {
      const uint4 b = q.Get(n, chunk);
      Mma(even[n], x.x, y.x, x.y, y.y, b.x, b.y);
      Mma(odd[n], x.z, y.z, x.w, y.w, b.z, b.w);
    }
  }
}

// The same of the last 16 dimensions, where head_dim is no multiple of a chunk.
template <class T>
__device__ __forceinline__ void HalfChunkScores(const uint8_t* k, int32_t lane, const Query<T>& q,
                                                float (&even)[T::kNTiles][4]) {
  constexpr int32_t kStart = T::kChunks * kChunkDims * kTileTokens * (T::kFp8 ? 1 : 2);
  uint32_t a[4];
  if constexpr (T::kFp8) {
    const uint2 x = reinterpret_cast<const uint2*>(k + kStart)[lane];
    a[0] = ExpandA(x.x);
    a[1] = ExpandA(x.y);
    a[2] = ExpandB(x.x);
    a[3] = ExpandB(x.y);
  } else {
    const uint4 x = reinterpret_cast<const uint4*>(k + kStart)[lane];
    a[0] = x.x;
    a[1] = x.z;
    a[2] = x.y;
    a[3] = x.w;
  }
#pragma unroll
  for (int32_t n = 0; n < T::kNTiles; ++n) {
    const uint4 b = q.Get(n, T::kChunks);
    Mma(even[n], a[0], a[1], a[2], a[3], b.x, b.y);
  }
}

// Scores of a tile's tokens g and g + 8 (s[n][0..1], s[n][2..3]), scaled and capped. With few N
// tiles there are two chains of products, since one would wait for itself.
template <class T>
__device__ __forceinline__ void TileScores(const uint8_t* tile, int32_t lane, const Query<T>& q,
                                           const ScoreTerms& terms, float (&s)[T::kNTiles][4]) {
  constexpr bool kTwoChains = T::kNTiles <= 2;
  float odd[T::kNTiles][4];
#pragma unroll
  for (int32_t n = 0; n < T::kNTiles; ++n) {
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) s[n][i] = odd[n][i] = 0.0F;
  }
#pragma unroll
  for (int32_t c = 0; c < T::kChunks; ++c) {
    ChunkScores<T>(tile, c, lane, q, s, kTwoChains ? odd : s);
  }
  if constexpr (T::kHalfChunk) HalfChunkScores<T>(tile, lane, q, s);

  float factor[2] = {terms.factor, terms.factor};
  if constexpr (T::kFp8) {
    const float* k_scale = reinterpret_cast<const float*>(tile + TileKScales(T::kHeadDim));
    factor[0] *= k_scale[lane / 4];
    factor[1] *= k_scale[lane / 4 + 8];
  }
#pragma unroll
  for (int32_t n = 0; n < T::kNTiles; ++n) {
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      s[n][i] = (kTwoChains ? s[n][i] + odd[n][i] : s[n][i]) * factor[i / 2];
    }
  }
  if (terms.cap != 0.0F) {
#pragma unroll
    for (int32_t n = 0; n < T::kNTiles; ++n) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        // cap * tanh(s / cap), as 1 - 2 / (1 + e^2x): its error is one of the result's size.
        s[n][i] = terms.cap - 2.0F * terms.cap / (1.0F + Exp2(s[n][i] * terms.two_over_cap));
      }
    }
  }
}

// Scores of keys that a column does not see become -inf. token: of the tile's first.
template <class T>
__device__ __forceinline__ void MaskScores(int32_t token, int32_t lane, const Visibility& seen,
                                           float (&s)[T::kNTiles][4]) {
#pragma unroll
  for (int32_t n = 0; n < T::kNTiles; ++n) {
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      const int32_t later = seen.Later(8 * n + 2 * (lane % 4) + i % 2);
      const int32_t key = token + lane / 4 + 8 * (i / 2) - later;
      if (key >= seen.key_end || key < seen.key_first) s[n][i] = -INFINITY;
    }
  }
}

// Tokens [first, end) of a tile that some column sees.
__device__ __forceinline__ int2 SeenOfTile(int32_t token, const Visibility& seen) {
  return {seen.key_first - token, seen.key_end + seen.later_max - token};
}

// Clears what no column sees in a V tile of bf16 in shared memory: it may be NaN, and 0 * NaN would
// spread. (Codes are never NaN here.) Each lane clears what it will load itself.
template <class T>
__device__ __forceinline__ void ClearUnseenV(uint8_t* v, int32_t lane, int2 seen) {
  uint32_t keep[2];  // of registers of tokens 2t, 2t + 1 and of those + 8
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    const int32_t low = 2 * (lane % 4) + 8 * i;
    keep[i] = (low >= seen.x && low < seen.y ? 0xFFFFU : 0U) |
              (low + 1 >= seen.x && low + 1 < seen.y ? 0xFFFF0000U : 0U);
  }
#pragma unroll 1
  for (int32_t d = 0; d < T::kDimTiles; ++d) {
    uint4& x = reinterpret_cast<uint4*>(v)[d * kWarpLanes + lane];
    x = {x.x & keep[0], x.y & keep[0], x.z & keep[1], x.w & keep[1]};
  }
}

// Weights of a tile's tokens g and g + 8 times v_scale: P as mma's B, columns g, tokens 2t, 2t + 1
// and
// + 8.
template <class T>
__device__ __forceinline__ void WeightsOfTile(const float (&s)[T::kNTiles][4],
                                              const float (&scale)[2], Accumulator<T>& acc,
                                              uint32_t (&p)[T::kNTiles][2]) {
#pragma unroll
  for (int32_t n = 0; n < T::kNTiles; ++n) {
    float w[4];
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      w[i] = Exp2(s[n][i] - acc.max[n][i % 2]);
      acc.sum[n][i % 2] += w[i];
      if constexpr (T::kFp8) w[i] *= scale[i / 2] * acc.per_unit[n][i % 2];
    }
    p[n][0] = Transpose8x8(PackBf16(w[0], w[1]));
    p[n][1] = Transpose8x8(PackBf16(w[2], w[3]));
  }
}

// v_scale of tokens g and g + 8, scaled up like the query.
template <class T>
__device__ __forceinline__ void VScales(const uint8_t* tile, int32_t lane, float (&scale)[2]) {
  scale[0] = scale[1] = 1.0F;
  if constexpr (T::kFp8) {
    const float* v_scale = reinterpret_cast<const float*>(tile + TileVScales(T::kHeadDim));
    scale[0] = v_scale[lane / 4] * PowerOfTwo(kExponentTrick);
    scale[1] = v_scale[lane / 4 + 8] * PowerOfTwo(kExponentTrick);
  }
}

// o += V P.
template <class T>
__device__ __forceinline__ void AccumulateTile(const uint8_t* v, int32_t lane,
                                               const uint32_t (&p)[T::kNTiles][2],
                                               Accumulator<T>& acc) {
#pragma unroll
  for (int32_t d = 0; d < T::kDimTiles; d += 2) {
    uint32_t a[8];
    const uint8_t* chunk = v + (d / 2) * kChunkDims * kTileTokens * (T::kFp8 ? 1 : 2);
    const bool whole = d + 1 < T::kDimTiles;
    if constexpr (T::kFp8) {
      const uint4 x = whole ? reinterpret_cast<const uint4*>(chunk)[lane] : uint4{};
      const uint2 y = whole ? uint2{x.x, x.y} : reinterpret_cast<const uint2*>(chunk)[lane];
      const uint32_t words[4] = {y.x, y.y, x.z, x.w};
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        a[2 * i] = ExpandA(words[i]);
        a[2 * i + 1] = ExpandB(words[i]);
      }
    } else {
      const uint4 x = reinterpret_cast<const uint4*>(chunk)[lane];
      const uint4 y = whole ? reinterpret_cast<const uint4*>(chunk)[kWarpLanes + lane] : uint4{};
      const uint32_t words[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
#pragma unroll
      for (int32_t i = 0; i < 8; ++i) a[i] = words[i];
    }
#pragma unroll
    for (int32_t n = 0; n < T::kNTiles; ++n) {
      Mma(acc.o[n][d], a[0], a[1], a[2], a[3], p[n][0], p[n][1]);
      if (whole) Mma(acc.o[n][whole ? d + 1 : d], a[4], a[5], a[6], a[7], p[n][0], p[n][1]);
    }
  }
}

// What the sums of a column are counted in: the mantissa of the v_scale of the token with the
// maximum. Its weight is then a power of two, which rounding to bf16 leaves as it is; a key that
// has nearly all of the weight would otherwise put up to 2^-8 of its value into the output. Returns
// 1 / that.
template <class T, int32_t kTiles>
__device__ __forceinline__ float PerUnit(const float (&s)[kTiles][T::kNTiles][4],
                                         const float (&scale)[kTiles][2], int32_t n, int32_t i,
                                         float max) {
  float of_max = 0.0F;
#pragma unroll
  for (int32_t m = 0; m < kTiles; ++m) {
    if (s[m][n][i] == max) of_max = scale[m][0];
    if (s[m][n][2 + i] == max) of_max = scale[m][1];
  }
#pragma unroll
  for (int32_t step = 4; step < kWarpLanes; step *= 2) {
    of_max = fmaxf(of_max, __shfl_xor_sync(kAllLanes, of_max, step));
  }
  const uint32_t mantissa = __float_as_uint(of_max) & 0x007FFFFFU;
  return __fdividef(1.0F, __uint_as_float(mantissa | 0x3F800000U));
}

// Raises the running maxima to those of s and scales what was summed so far.
template <class T, int32_t kTiles>
__device__ __forceinline__ void RaiseMaximum(const float (&s)[kTiles][T::kNTiles][4],
                                             const float (&scale)[kTiles][2], Accumulator<T>& acc) {
#pragma unroll
  for (int32_t n = 0; n < T::kNTiles; ++n) {
    float max[2] = {acc.max[n][0], acc.max[n][1]};
#pragma unroll
    for (int32_t m = 0; m < kTiles; ++m) {
      max[0] = fmaxf(max[0], fmaxf(s[m][n][0], s[m][n][2]));
      max[1] = fmaxf(max[1], fmaxf(s[m][n][1], s[m][n][3]));
    }
#pragma unroll
    for (int32_t step = 4; step < kWarpLanes; step *= 2) {
      max[0] = fmaxf(max[0], __shfl_xor_sync(kAllLanes, max[0], step));
      max[1] = fmaxf(max[1], __shfl_xor_sync(kAllLanes, max[1], step));
    }
    const bool rises = max[0] > acc.max[n][0] || max[1] > acc.max[n][1];
    if (!__any_sync(kAllLanes, rises)) continue;
    float down[2];
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      down[i] = Exp2(acc.max[n][i] - max[i]);
      acc.sum[n][i] *= down[i];
      if constexpr (T::kFp8) {
        const float per_unit = PerUnit<T, kTiles>(s, scale, n, i, max[i]);
        if (max[i] > acc.max[n][i]) {
          down[i] *= __fdividef(per_unit, acc.per_unit[n][i]);
          acc.per_unit[n][i] = per_unit;
        }
      }
      acc.max[n][i] = max[i];
    }
#pragma unroll
    for (int32_t d = 0; d < T::kDimTiles; ++d) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) acc.o[n][d][i] *= down[i % 2];
    }
  }
}

// kTiles tiles from `tiles` on, whose first token is `token`. is_edge: some of their tokens are
// unseen by some column, or were never copied.
template <class T, int32_t kTiles>
__device__ __forceinline__ void AttendTiles(uint8_t* tiles, int32_t token, bool is_edge,
                                            int32_t lane, const Query<T>& q,
                                            const ScoreTerms& terms, const Visibility& seen,
                                            Accumulator<T>& acc) {
  float s[kTiles][T::kNTiles][4];
#pragma unroll
  for (int32_t m = 0; m < kTiles; ++m) {
    TileScores<T>(tiles + m * T::kTileBytes, lane, q, terms, s[m]);
  }
  float scale[kTiles][2];
#pragma unroll
  for (int32_t m = 0; m < kTiles; ++m) VScales<T>(tiles + m * T::kTileBytes, lane, scale[m]);
  if (is_edge) {
#pragma unroll
    for (int32_t m = 0; m < kTiles; ++m) {
      MaskScores<T>(token + m * kTileTokens, lane, seen, s[m]);
      const int2 of_tile = SeenOfTile(token + m * kTileTokens, seen);
      if constexpr (T::kFp8) {
#pragma unroll
        for (int32_t i = 0; i < 2; ++i) {
          const int32_t at = lane / 4 + 8 * i;
          if (at < of_tile.x || at >= of_tile.y) scale[m][i] = 0.0F;
        }
      } else {
        ClearUnseenV<T>(tiles + m * T::kTileBytes + T::kVOffset, lane, of_tile);
      }
    }
  }
  RaiseMaximum<T, kTiles>(s, scale, acc);
#pragma unroll
  for (int32_t m = 0; m < kTiles; ++m) {
    const uint8_t* v = tiles + m * T::kTileBytes + T::kVOffset;
    uint32_t p[T::kNTiles][2];
    WeightsOfTile<T>(s[m], scale[m], acc, p);
    AccumulateTile<T>(v, lane, p, acc);
  }
}

}  // namespace fp8kvd::kernels::cuda
