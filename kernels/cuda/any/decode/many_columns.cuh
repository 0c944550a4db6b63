// kernels/cuda/any/decode/many_columns.cuh: what tile.cuh is for 8 query columns and for bf16, for
// 16 and more in fp8_kv. Columns are M of mma.m16n8k16 here; tokens, and then dimensions, are N.
// The fragments in which K and V lie (page_layout.h) are two B operands each as well as one A, and
// scores come out as the A operand that P has to be: nothing is transposed, and what belongs to a
// column is in four lanes, in half as many registers. (With 8 columns M would be half empty.)
//
// Lane (g, t) has columns g and g + 8 of each M tile, and of a tile the tokens 2t, 2t + 1 (block 0)
// and 2t + 8, 2t + 9 (block 1).
#pragma once

#include <cstdint>

#include "kernels/cuda/any/decode/registers.cuh"
#include "kernels/cuda/any/decode/scores.cuh"
#include "kernels/cuda/any/decode/tile.cuh"
#include "kernels/cuda/any/ptx.cuh"

namespace fp8kvd::kernels::cuda {

// Tiles on their way through a warp: kTilesAtOnce of them. Used as Tiles is.
template <class T>
class ManyColumnTiles {
 public:
  __device__ __forceinline__ void Begin(uint8_t* tiles, int32_t lane, const Query<T>& q) {
    tiles_ = tiles;
    Multiply(q, [&](int32_t m, int32_t c) { return KeysOf(m, c, lane); });
  }
  // keys: of the first of them.
  __device__ __forceinline__ void Begin(uint8_t* tiles, const FirstKeys<T>& keys, int32_t lane,
                                        const Query<T>& q) {
    tiles_ = tiles;
    Multiply(q, [&](int32_t m, int32_t c) { return m == 0 ? keys.chunks[c] : KeysOf(m, c, lane); });
  }

  // From products to weights; after Begin.
  template <bool kFirst, class Seen>
  __device__ __forceinline__ void Score(int32_t token, bool is_edge, int32_t lane,
                                        const ScoreTerms& terms, const Seen& seen,
                                        Accumulator<T>& acc) {
    LoadScales(lane, terms);
    if (is_edge || terms.cap != 0.0F) {
      Scale();
      if (terms.cap != 0.0F) Cap(terms);
      if (is_edge) Mask(token, lane, seen());
    }
    float sums[kMTiles][2];
    bool moves = kFirst;
    if constexpr (!kFirst) moves = __any_sync(kAllLanes, Weigh<false>(acc, sums) || are_large_);
    if (moves) {
      Scale();
      PlaceOrigins(acc);
      Weigh<true>(acc, sums);
    }
#pragma unroll
    for (int32_t j = 0; j < kMTiles; ++j) {
      acc.sum[j][0] += sums[j][0];
      acc.sum[j][1] += sums[j][1];
    }
  }

  // Adds these tiles' part to the output.
  __device__ __forceinline__ void End(int32_t lane, Accumulator<T>& acc) const {
#pragma unroll
    for (int32_t m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int32_t c = 0; c < kParts; ++c) Accumulate(V(m), c, lane, p_[m], acc);
    }
  }

 private:
  static_assert(T::kFp8);
  static constexpr int32_t kTiles = T::kTilesAtOnce;
  static constexpr int32_t kParts = T::kChunks + (T::kHalfChunk ? 1 : 0);
  static constexpr int32_t kMTiles = T::kNTiles / 2;
  // Of products: with few tiles one chain would wait for itself.
  static constexpr int32_t kChains = kTiles * kMTiles == 1 ? 2 : 1;
  // From where above its origin a score moves it, when any has to: four weights of such scores come
  // to no more than one may be.
  static constexpr int32_t kNearMax = kScoreMax - 2;
  // Scores up to which rounding takes less than 2^-8.
  static constexpr float kLarge = PowerOfTwo(16);

  __device__ __forceinline__ uint8_t* V(int32_t m) const {
    return tiles_ + m * T::kTileBytes + T::kVOffset;
  }
  __device__ __forceinline__ KeyChunk<T> KeysOf(int32_t m, int32_t c, int32_t lane) const {
    KeyChunk<T> keys;
    keys.Load(tiles_ + m * T::kTileBytes, c, lane);
    return keys;
  }

  // Products of all tiles. keys(m, c): of tile m; chunk kChunks is the half one, of one k-step.
  template <class Keys>
  __device__ __forceinline__ void Multiply(const Query<T>& q, const Keys& keys) {
#pragma unroll
    for (int32_t m = 0; m < kTiles; ++m) {
      float of_steps[kChains][T::kNTiles][4] = {};
#pragma unroll
      for (int32_t c = 0; c < kParts; ++c) {
        const KeyChunk<T> chunk = keys(m, c);
#pragma unroll
        for (int32_t k = 0; k < (c < T::kChunks ? 2 : 1); ++k) {
          const uint32_t* b = chunk.a + 4 * k;
          auto& s = of_steps[k % kChains];
#pragma unroll
          for (int32_t j = 0; j < kMTiles; ++j) {
            const uint4 a = q.Get(2 * j + k, c);
            Mma<T>(s[2 * j], a.x, a.y, a.z, a.w, b[0], b[2]);
            Mma<T>(s[2 * j + 1], a.x, a.y, a.z, a.w, b[1], b[3]);
          }
        }
      }
#pragma unroll
      for (int32_t n = 0; n < T::kNTiles; ++n) {
#pragma unroll
        for (int32_t i = 0; i < 4; ++i) {
          s_[m][n][i] = of_steps[0][n][i];
          if constexpr (kChains > 1) s_[m][n][i] += of_steps[1][n][i];
        }
      }
    }
  }

  __device__ __forceinline__ void LoadScales(int32_t lane, const ScoreTerms& terms) {
#pragma unroll
    for (int32_t m = 0; m < kTiles; ++m) {
      const uint8_t* tile = tiles_ + m * T::kTileBytes;
      const auto* k_scale = reinterpret_cast<const float2*>(tile + TileKScales(T::kHeadDim));
      const auto* v_scale = reinterpret_cast<const float2*>(tile + TileVScales(T::kHeadDim));
#pragma unroll
      for (int32_t b = 0; b < 2; ++b) {
        const float2 k = k_scale[lane % 4 + 4 * b];
        const float2 v = v_scale[lane % 4 + 4 * b];
        factor_[m][b][0] = k.x * terms.factor;
        factor_[m][b][1] = k.y * terms.factor;
        v_scale_[m][b][0] = v.x;
        v_scale_[m][b][1] = v.y;
      }
    }
  }

  // Takes the factors into the scores, rounded.
  __device__ __forceinline__ void Scale() {
#pragma unroll
    for (int32_t m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int32_t n = 0; n < T::kNTiles; ++n) {
#pragma unroll
        for (int32_t i = 0; i < 4; ++i) s_[m][n][i] *= factor_[m][n % 2][i % 2];
      }
#pragma unroll
      for (int32_t b = 0; b < 2; ++b) factor_[m][b][0] = factor_[m][b][1] = 1.0F;
    }
  }

  __device__ __forceinline__ void Cap(const ScoreTerms& terms) {
#pragma unroll
    for (int32_t m = 0; m < kTiles; ++m) CapScores<T>(terms, s_[m]);
  }

  // token: the tiles' first.
  __device__ __forceinline__ void Mask(int32_t token, int32_t lane, const Visibility& seen) {
#pragma unroll
    for (int32_t m = 0; m < kTiles; ++m) {
      const int32_t first = token + m * kTileTokens;
      const int2 of_tile = SeenOfTile(first, seen);
#pragma unroll
      for (int32_t b = 0; b < 2; ++b) {
#pragma unroll
        for (int32_t i = 0; i < 2; ++i) {
          const int32_t at = 2 * (lane % 4) + 8 * b + i;
          if (at < of_tile.x || at >= of_tile.y) v_scale_[m][b][i] = 0.0F;
#pragma unroll
          for (int32_t j = 0; j < kMTiles; ++j) {
#pragma unroll
            for (int32_t h = 0; h < 2; ++h) {
              const int32_t key = first + at - seen.Later(Accumulator<T>::Column(j, h, lane));
              const bool unseen = key >= seen.key_end || key < seen.key_first;
              if (unseen) s_[m][2 * j + b][2 * h + i] = -INFINITY;
            }
          }
        }
      }
      ClearUnseenV<T>(V(m), lane, of_tile);
    }
  }

  // The tiles' weights times v_scale, and this lane's shares of the denominators. Returns whether
  // four weights come to more than one may be, or v_scale is beyond what it may be. kPlaced:
  // factors are in the scores, rounded as the origins are. Without, the fma counts what rounding
  // took of an origin, which matters where they are_large_.
  template <bool kPlaced>
  __device__ __forceinline__ bool Weigh(const Accumulator<T>& acc, float (&sums)[kMTiles][2]) {
    float most = 0.0F;
    bool too_large = false;
#pragma unroll
    for (int32_t m = 0; m < kTiles; ++m) {
      float up[2][2];
#pragma unroll
      for (int32_t b = 0; b < 2; ++b) {
#pragma unroll
        for (int32_t i = 0; i < 2; ++i) {
          up[b][i] = v_scale_[m][b][i] * acc.v_up;
          too_large = too_large | (up[b][i] > PowerOfTwo(kVExponentMax));
        }
      }
#pragma unroll
      for (int32_t j = 0; j < kMTiles; ++j) {
#pragma unroll
        for (int32_t h = 0; h < 2; ++h) {
          float of_blocks[2];
#pragma unroll
          for (int32_t b = 0; b < 2; ++b) {
            float w[2];
#pragma unroll
            for (int32_t i = 0; i < 2; ++i) {
              const float s = s_[m][2 * j + b][2 * h + i];
              const float origin = acc.origin[j][h];
              w[i] = Exp2(kPlaced ? s - origin : fmaf(s, factor_[m][b][i], -origin));
            }
            of_blocks[b] = w[0] + w[1];
            p_[m][j][2 * b + h] = PackF16(w[0] * up[b][0], w[1] * up[b][1]);
          }
          const float of_tile = of_blocks[0] + of_blocks[1];
          most = fmaxf(most, of_tile);
          sums[j][h] = m == 0 ? of_tile : sums[j][h] + of_tile;
        }
      }
    }
    return too_large | (most > PowerOfTwo(kScoreMax));
  }

  // Moves origins up to where these scores need them, and v_up. Factors are in the scores.
  __device__ __forceinline__ void PlaceOrigins(Accumulator<T>& acc) {
    const float o_factor = PlaceVUp(acc);
    are_large_ = false;
#pragma unroll
    for (int32_t j = 0; j < kMTiles; ++j) {
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        float max = -INFINITY;
#pragma unroll
        for (int32_t m = 0; m < kTiles; ++m) {
#pragma unroll
          for (int32_t b = 0; b < 2; ++b) {
            const float* s = s_[m][2 * j + b] + 2 * h;
            max = fmaxf(max, fmaxf(s[0], s[1]));
          }
        }
        max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, 1));
        max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, 2));
        const float from = acc.origin[j][h];
        const float to = max > from + kNearMax ? max : from;
        const float down = Exp2(from - to);
        acc.origin[j][h] = to;
        acc.sum[j][h] *= down;
        are_large_ = are_large_ || fabsf(to) > kLarge;
#pragma unroll
        for (auto& of_dims : acc.o[j]) {
          of_dims[2 * h] *= down * o_factor;
          of_dims[2 * h + 1] *= down * o_factor;
        }
      }
    }
  }

  // v_up where it is not set, or too large for these tiles. Returns what o is to be multiplied by.
  __device__ __forceinline__ float PlaceVUp(Accumulator<T>& acc) const {
    float largest = 0.0F;
#pragma unroll
    for (int32_t m = 0; m < kTiles; ++m) {
#pragma unroll
      for (const auto& of_block : v_scale_[m]) {
        largest = fmaxf(largest, fmaxf(of_block[0], of_block[1]));
      }
    }
    return MoveVUp(VUpFor(largest), acc);
  }

  // o += P V for one chunk of dimensions; chunk kChunks is the half one.
  __device__ __forceinline__ static void Accumulate(const uint8_t* v, int32_t c, int32_t lane,
                                                    const uint32_t (&p)[kMTiles][4],
                                                    Accumulator<T>& acc) {
    uint32_t b[8];
    LoadVChunk<T>(v, c, lane, b);
    constexpr int32_t kOfChunk = 4;  // N tiles
#pragma unroll
    for (int32_t d = 0; d < (c < T::kChunks ? kOfChunk : kOfChunk / 2); ++d) {
      const uint32_t* of_tile = b + d / 2 * 4 + d % 2;
#pragma unroll
      for (int32_t j = 0; j < kMTiles; ++j) {
        Mma<T>(acc.o[j][kOfChunk * c + d], p[j][0], p[j][1], p[j][2], p[j][3], of_tile[0],
               of_tile[2]);
      }
    }
  }

  uint8_t* tiles_;
  // From Begin to Score: products, and scores but for their factor; [2 * M tile + block].
  float s_[kTiles][T::kNTiles][4];
  float factor_[kTiles][2][2];  // of a lane's tokens, by block
  float v_scale_[kTiles][2][2];
  uint32_t p_[kTiles][kMTiles][4];  // from Score to End: P times v_scale, mma's A
  bool are_large_ = false;          // origins of this lane's columns, some of them
};

}  // namespace fp8kvd::kernels::cuda
