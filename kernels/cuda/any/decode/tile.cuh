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

// Products of a tile's tokens g and g + 8 (0..1, 2..3) with the query columns, not yet scaled. With
// few N tiles there are two chains of products, since one would wait for itself.
template <class T>
struct Products {
  static constexpr bool kTwoChains = T::kNTiles <= 2;
  float even[T::kNTiles][4];
  float odd[kTwoChains ? T::kNTiles : 1][4];

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int32_t n = 0; n < T::kNTiles; ++n) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) even[n][i] = odd[kTwoChains ? n : 0][i] = 0.0F;
    }
  }

  // Adds one chunk of the tile's K; chunk kChunks is the half one.
  __device__ __forceinline__ void Add(const uint8_t* tile, int32_t chunk, int32_t lane,
                                      const Query<T>& q) {
    if (chunk == T::kChunks) {
      if constexpr (T::kHalfChunk) HalfChunkScores<T>(tile, lane, q, even);
    } else if constexpr (kTwoChains) {
      ChunkScores<T>(tile, chunk, lane, q, even, odd);
    } else {
      ChunkScores<T>(tile, chunk, lane, q, even, even);
    }
  }

  // factor: of tokens g and g + 8.
  __device__ __forceinline__ void Scale(const float (&factor)[2], float (&s)[T::kNTiles][4]) const {
#pragma unroll
    for (int32_t n = 0; n < T::kNTiles; ++n) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        const float sum = kTwoChains ? even[n][i] + odd[kTwoChains ? n : 0][i] : even[n][i];
        s[n][i] = sum * factor[i / 2];
      }
    }
  }
};

// What turns the products of tokens g and g + 8 into scores.
template <class T>
__device__ __forceinline__ void ScoreFactors(const uint8_t* tile, int32_t lane,
                                             const ScoreTerms& terms, float (&factor)[2]) {
  factor[0] = factor[1] = terms.factor;
  if constexpr (T::kFp8) {
    const float* k_scale = reinterpret_cast<const float*>(tile + TileKScales(T::kHeadDim));
    factor[0] *= k_scale[lane / 4];
    factor[1] *= k_scale[lane / 4 + 8];
  }
}

// cap * tanh(s / cap), as 1 - 2 / (1 + e^2x): its error is one of the result's size.
template <class T>
__device__ __forceinline__ void CapScores(const ScoreTerms& terms, float (&s)[T::kNTiles][4]) {
#pragma unroll
  for (int32_t n = 0; n < T::kNTiles; ++n) {
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      const float denominator = 1.0F + Exp2(s[n][i] * terms.two_over_cap);
      s[n][i] = terms.cap - 2.0F * terms.cap * Reciprocal(denominator);
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

// o += V P for one chunk of dimensions; chunk kChunks is the half one.
template <class T>
__device__ __forceinline__ void AccumulateChunk(const uint8_t* v, int32_t c, int32_t lane,
                                                const uint32_t (&p)[T::kNTiles][2],
                                                Accumulator<T>& acc) {
  uint32_t a[8];
  const uint8_t* chunk = v + c * kChunkDims * kTileTokens * (T::kFp8 ? 1 : 2);
  const bool whole = c < T::kChunks;
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
    Mma(acc.o[n][2 * c], a[0], a[1], a[2], a[3], p[n][0], p[n][1]);
    if (whole) {
      Mma(acc.o[n][whole ? 2 * c + 1 : 2 * c], a[4], a[5], a[6], a[7], p[n][0], p[n][1]);
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

// Raises the running maxima of kCount N tiles from n0 on to those of s and scales what was summed
// so far. The N tiles' exchanges go out together.
template <class T, int32_t kTiles, int32_t kCount>
__device__ __forceinline__ void RaiseMaximum(int32_t n0, const float (&s)[kTiles][T::kNTiles][4],
                                             const float (&scale)[kTiles][2], Accumulator<T>& acc) {
  float max[kCount][2];
#pragma unroll
  for (int32_t n = 0; n < kCount; ++n) {
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      max[n][i] = acc.max[n0 + n][i];
#pragma unroll
      for (int32_t m = 0; m < kTiles; ++m) {
        max[n][i] = fmaxf(max[n][i], fmaxf(s[m][n0 + n][i], s[m][n0 + n][2 + i]));
      }
    }
  }
#pragma unroll
  for (int32_t step = 4; step < kWarpLanes; step *= 2) {
#pragma unroll
    for (int32_t n = 0; n < kCount; ++n) {
#pragma unroll
      for (int32_t i = 0; i < 2; ++i) {
        max[n][i] = fmaxf(max[n][i], __shfl_xor_sync(kAllLanes, max[n][i], step));
      }
    }
  }
  bool rises = false;
#pragma unroll
  for (int32_t n = 0; n < kCount; ++n) {
    rises = rises || max[n][0] > acc.max[n0 + n][0] || max[n][1] > acc.max[n0 + n][1];
  }
  if (!__any_sync(kAllLanes, rises)) return;
#pragma unroll
  for (int32_t n = 0; n < kCount; ++n) {
    float down[2];
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      float& old = acc.max[n0 + n][i];
      down[i] = Exp2(old - max[n][i]);
      acc.sum[n0 + n][i] *= down[i];
      if constexpr (T::kFp8) {
        const float per_unit = PerUnit<T, kTiles>(s, scale, n0 + n, i, max[n][i]);
        if (max[n][i] > old) {
          down[i] *= __fdividef(per_unit, acc.per_unit[n0 + n][i]);
          acc.per_unit[n0 + n][i] = per_unit;
        }
      }
      old = max[n][i];
    }
#pragma unroll
    for (int32_t d = 0; d < T::kDimTiles; ++d) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) acc.o[n0 + n][d][i] *= down[i % 2];
    }
  }
}

// Tiles on their way through a warp: kTilesAtOnce of them, from products to their part of the
// output. A warp takes the products of the next tiles while it accumulates these (Turn), so that
// neither waits for its own chain of products.
template <class T>
class Tiles {
 public:
  __device__ __forceinline__ void Begin(uint8_t* tiles, int32_t lane, const Query<T>& q) {
    Products<T> products[kTiles];
#pragma unroll
    for (int32_t m = 0; m < kTiles; ++m) {
      products[m].Clear();
#pragma unroll
      for (int32_t c = 0; c < kParts; ++c) products[m].Add(tiles + m * T::kTileBytes, c, lane, q);
    }
    Take(tiles, products);
  }

  // Adds these tiles' part to the output, and goes on to `next`.
  __device__ __forceinline__ void Turn(uint8_t* next, int32_t lane, const Query<T>& q,
                                       Accumulator<T>& acc) {
    Products<T> products[kTiles];
#pragma unroll
    for (int32_t m = 0; m < kTiles; ++m) {
      products[m].Clear();
      uint32_t p[T::kNTiles][2];
      WeightsOfTile<T>(scores_[m], v_scale_[m], acc, p);
#pragma unroll
      for (int32_t c = 0; c < kParts; ++c) {
        products[m].Add(next + m * T::kTileBytes, c, lane, q);
        AccumulateChunk<T>(V(m), c, lane, p, acc);
      }
    }
    Take(next, products);
  }

  __device__ __forceinline__ void End(int32_t lane, Accumulator<T>& acc) {
#pragma unroll
    for (int32_t m = 0; m < kTiles; ++m) {
      uint32_t p[T::kNTiles][2];
      WeightsOfTile<T>(scores_[m], v_scale_[m], acc, p);
#pragma unroll
      for (int32_t c = 0; c < kParts; ++c) AccumulateChunk<T>(V(m), c, lane, p, acc);
    }
  }

  // From products to scores and to the maximum so far; after Begin or Turn. token: the tiles'
  // first. is_edge: some of their tokens are unseen by some column, or were never copied; seen()
  // says which.
  template <class Seen>
  __device__ __forceinline__ void Score(int32_t token, bool is_edge, int32_t lane,
                                        const ScoreTerms& terms, const Seen& seen,
                                        Accumulator<T>& acc) {
#pragma unroll
    for (int32_t m = 0; m < kTiles; ++m) {
      float factor[2];
      ScoreFactors<T>(tiles_ + m * T::kTileBytes, lane, terms, factor);
      products_[m].Scale(factor, scores_[m]);
      VScales<T>(tiles_ + m * T::kTileBytes, lane, v_scale_[m]);
    }
    if (terms.cap != 0.0F) {
#pragma unroll
      for (int32_t m = 0; m < kTiles; ++m) CapScores<T>(terms, scores_[m]);
    }
    if (is_edge) Mask(token, lane, seen());
    constexpr int32_t kCount = T::kTurns && T::kNTiles % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int32_t n = 0; n < T::kNTiles; n += kCount) {
      RaiseMaximum<T, kTiles, kCount>(n, scores_, v_scale_, acc);
    }
  }

 private:
  static constexpr int32_t kTiles = T::kTilesAtOnce;
  static constexpr int32_t kParts = T::kChunks + (T::kHalfChunk ? 1 : 0);

  __device__ __forceinline__ uint8_t* V(int32_t m) const {
    return tiles_ + m * T::kTileBytes + T::kVOffset;
  }

  __device__ __forceinline__ void Take(uint8_t* tiles, const Products<T> (&products)[kTiles]) {
    tiles_ = tiles;
#pragma unroll
    for (int32_t m = 0; m < kTiles; ++m) products_[m] = products[m];
  }

  __device__ __forceinline__ void Mask(int32_t token, int32_t lane, const Visibility& seen) {
#pragma unroll
    for (int32_t m = 0; m < kTiles; ++m) {
      MaskScores<T>(token + m * kTileTokens, lane, seen, scores_[m]);
      const int2 of_tile = SeenOfTile(token + m * kTileTokens, seen);
      if constexpr (T::kFp8) {
#pragma unroll
        for (int32_t i = 0; i < 2; ++i) {
          const int32_t at = lane / 4 + 8 * i;
          if (at < of_tile.x || at >= of_tile.y) v_scale_[m][i] = 0.0F;
        }
      } else {
        ClearUnseenV<T>(V(m), lane, of_tile);
      }
    }
  }

  uint8_t* tiles_;
  Products<T> products_[kTiles];  // from Begin or Turn to Score
  float scores_[kTiles][T::kNTiles][4];
  float v_scale_[kTiles][2];
};

}  // namespace fp8kvd::kernels::cuda
