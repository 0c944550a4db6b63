// kernels/cuda/any/decode/scores.cuh: from a tile's products with the query to the exponents of its
// weights: scale, cap, mask, and the origins that a column's scores are counted from. All in
// registers, in the fragment that mma leaves: tokens g and g + 8, columns 2t and 2t + 1 of each N
// tile.
#pragma once

#include <cstdint>

#include "kernels/cuda/any/decode/registers.cuh"
#include "kernels/cuda/any/ptx.cuh"

namespace fp8kvd::kernels::cuda {

// What turns products into scores in units of log2.
struct ScoreTerms {
  float factor;        // sm_scale * log2(e), in fp8_kv times Query::down
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

// v_scale of tokens g and g + 8.
template <class T>
__device__ __forceinline__ void LoadVScales(const uint8_t* tile, int32_t lane, float (&scale)[2]) {
  scale[0] = scale[1] = 1.0F;
  if constexpr (T::kFp8) {
    const float* v_scale = reinterpret_cast<const float*>(tile + TileVScales(T::kHeadDim));
    scale[0] = v_scale[lane / 4];
    scale[1] = v_scale[lane / 4 + 8];
  }
}

// Tiles between their products and their weights.
template <class T>
struct Scores {
  static constexpr int32_t kTiles = T::kTilesAtOnce;
  float s[kTiles][T::kNTiles][4];
  float v_scale[kTiles][2];  // of tokens g and g + 8
};

// This lane's maxima of the columns 2t and 2t + 1 of N tile n.
template <class T>
__device__ __forceinline__ void LaneMaxima(const Scores<T>& scores, int32_t n, float (&max)[2]) {
  max[0] = max[1] = -INFINITY;
#pragma unroll
  for (int32_t m = 0; m < scores.kTiles; ++m) {
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) max[i % 2] = fmaxf(max[i % 2], scores.s[m][n][i]);
  }
}

// The columns' maxima over all tokens, from those of the lanes.
__device__ __forceinline__ void MaximaOfLanes(float (&max)[2]) {
#pragma unroll
  for (int32_t step = 4; step < kWarpLanes; step *= 2) {
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      max[i] = fmaxf(max[i], __shfl_xor_sync(kAllLanes, max[i], step));
    }
  }
}

// Moves the origins of N tile n up to these, and scales what was summed so far; o by `o_factor`,
// too.
template <class T>
__device__ __forceinline__ void MoveOrigins(const float (&to)[2], float o_factor, int32_t n,
                                            Accumulator<T>& acc) {
  float down[2];
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    const float origin = to[i] > acc.origin[n][i] ? to[i] : acc.origin[n][i];
    down[i] = Exp2(acc.origin[n][i] - origin);
    acc.origin[n][i] = origin;
    acc.sum[n][i] *= down[i];
    if constexpr (T::kFp8) down[i] *= o_factor;
  }
#pragma unroll
  for (int32_t d = 0; d < T::kDimTiles; ++d) {
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) acc.o[n][d][i] *= down[i % 2];
  }
}

// How far above a column's origin its scores may be. A move costs what a tile's products do, and of
// short ranges nearly each unit would move one.
inline constexpr int32_t kScoreMax = 3;

// P * v_scale is rounded to f16, so it is scaled: the first largest v_scale to 2^kVExponent, and
// again whenever one comes beyond 2^kVExponentMax. P is at most 2^kScoreMax, f16 ends at 2^16.
inline constexpr int32_t kVExponent = 10;
inline constexpr int32_t kVExponentMax = 12;
static_assert(kScoreMax + kVExponentMax < 16);

// The scale of the weights for a v_scale that is this lane's largest.
__device__ __forceinline__ float VUpFor(float largest) {
  constexpr int32_t kBias = 127;
  const uint32_t bits = __reduce_max_sync(kAllLanes, __float_as_uint(largest));
  // Scales below 2^-110 count as 0.
  const int32_t exponent = max(static_cast<int32_t>(bits >> 23) - kBias, -109);
  return PowerOfTwo(kVExponent - exponent);
}

// Sets v_up where it is not set yet, or is too large for tiles that want it at `up`. Returns what o
// is to be multiplied by.
template <class Sums>
__device__ __forceinline__ float MoveVUp(float up, Sums& acc) {
  const bool is_set = acc.v_up != 0.0F;
  if (is_set && acc.v_up < up * PowerOfTwo(kVExponentMax - kVExponent)) return 1.0F;
  const float factor = is_set ? up * acc.VDown() : 1.0F;
  acc.v_up = up;
  return factor;
}

// Places the scale of the weights where these tiles need it (Accumulator::v_up). Returns what o is
// to be multiplied by.
template <class T>
__device__ __forceinline__ float PlaceVUp(const Scores<T>& scores, Accumulator<T>& acc) {
  float largest = 0.0F;
#pragma unroll
  for (int32_t m = 0; m < scores.kTiles; ++m) {
    largest = fmaxf(largest, fmaxf(scores.v_scale[m][0], scores.v_scale[m][1]));
  }
  const float up = VUpFor(largest);
  const float factor = acc.v_up == 0.0F ? 1.0F : up * acc.VDown();
  acc.v_up = up;
  return factor;
}

// Brings the columns' origins to where these scores need them, and v_up. Few tiles move one, so the
// lanes ask each other first, once for all columns, and exchange maxima only then. kFirst: nothing
// is summed yet, and origins and v_up are where Clear put them.
template <class T, bool kFirst>
__device__ __forceinline__ void PlaceOrigins(const Scores<T>& scores, Accumulator<T>& acc) {
  constexpr bool kAsksForEach = T::kNTiles > 2;  // of one or two, asking costs what moving does
  float max[T::kNTiles][2];
  bool moves[T::kNTiles];  // as far as this lane knows
  bool any = false;
  bool too_large = false;
#pragma unroll
  for (int32_t n = 0; n < T::kNTiles; ++n) {
    LaneMaxima<T>(scores, n, max[n]);
    moves[n] = max[n][0] > acc.origin[n][0] + kScoreMax || max[n][1] > acc.origin[n][1] + kScoreMax;
    any = any || moves[n];
  }
  if constexpr (T::kFp8 && !kFirst) {
#pragma unroll
    for (int32_t m = 0; m < scores.kTiles; ++m) {
      const float most = fmaxf(scores.v_scale[m][0], scores.v_scale[m][1]);
      too_large = too_large || most * acc.v_up > PowerOfTwo(kVExponentMax);
    }
  }
  if (!kFirst && !__any_sync(kAllLanes, any || too_large)) return;
  float o_factor = 1.0F;
  if constexpr (T::kFp8) {
    if (kFirst || acc.v_up == 0.0F || __any_sync(kAllLanes, too_large)) {
      o_factor = PlaceVUp<T>(scores, acc);
    }
  }
#pragma unroll
  for (int32_t n = 0; n < T::kNTiles; ++n) {
    if (!kFirst && kAsksForEach && o_factor == 1.0F && !__any_sync(kAllLanes, moves[n])) continue;
    MaximaOfLanes(max[n]);
    if constexpr (kFirst) {
      acc.origin[n][0] = fmaxf(max[n][0], kEmptyMax);
      acc.origin[n][1] = fmaxf(max[n][1], kEmptyMax);
    } else {
      MoveOrigins<T>(max[n], o_factor, n, acc);
    }
  }
}

// Turns scores into what they are above their columns' origins, and scales up v_scale. (A product
// and a difference, each rounded: with fma the largest score might come out far above its own
// origin.)
template <class T>
__device__ __forceinline__ void CountScores(const Accumulator<T>& acc, Scores<T>& scores) {
#pragma unroll
  for (int32_t m = 0; m < scores.kTiles; ++m) {
    if constexpr (T::kFp8) {
      scores.v_scale[m][0] *= acc.v_up;
      scores.v_scale[m][1] *= acc.v_up;
    }
#pragma unroll
    for (int32_t n = 0; n < T::kNTiles; ++n) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        scores.s[m][n][i] = __fsub_rn(scores.s[m][n][i], acc.origin[n][i % 2]);
      }
    }
  }
}

}  // namespace fp8kvd::kernels::cuda
