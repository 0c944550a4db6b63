// kernels/cuda/any/decode/tile.cuh: one warp, one or more tiles in shared memory: scores, softmax
// and P V, all in registers. Tokens are M and query columns N of mma.m16n8k16 (many_columns.cuh has
// them the other way round), so a group of 8 wastes nothing; the scores come out as the A-like
// fragment of P, and one transposition of 8 x 8 a register makes them the B operand of V P.
#pragma once

#include <cstdint>

#include "kernels/cuda/any/decode/registers.cuh"
#include "kernels/cuda/any/decode/scores.cuh"
#include "kernels/cuda/any/expand.cuh"
#include "kernels/cuda/any/ptx.cuh"

namespace fp8kvd::kernels::cuda {

// Codes are exact in f16, bf16 rows are bf16.
template <class T>
__device__ __forceinline__ void Mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                    uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (T::kFp8) {
    MmaF16(c, a0, a1, a2, a3, b0, b1);
  } else {
    MmaBf16(c, a0, a1, a2, a3, b0, b1);
  }
}

// One chunk of a tile's K as mma's A, two k-steps. Chunk kChunks is the last 16 dimensions, where
// head_dim is no multiple of a chunk: one k-step.
template <class T>
struct KeyChunk {
  uint32_t a[8];

  __device__ __forceinline__ void Load(const uint8_t* k, int32_t chunk, int32_t lane) {
    const uint8_t* from = k + chunk * kChunkDims * kTileTokens * (T::kFp8 ? 1 : 2);
    const bool whole = chunk < T::kChunks;
    if (T::kFp8 && whole) {
      const uint4 x = reinterpret_cast<const uint4*>(from)[lane];
      TakeCodes(x.x, x.z, 0);
      TakeCodes(x.y, x.w, 4);
    } else if (T::kFp8) {
      const uint2 x = reinterpret_cast<const uint2*>(from)[lane];
      TakeCodes(x.x, x.y, 0);
    } else if (whole) {
      const uint4 x = reinterpret_cast<const uint4*>(from)[lane];
      const uint4 y = reinterpret_cast<const uint4*>(from)[kWarpLanes + lane];
      Take(x.x, y.x, x.y, y.y, 0);
      Take(x.z, y.z, x.w, y.w, 4);
    } else {
      const uint4 x = reinterpret_cast<const uint4*>(from)[lane];
      Take(x.x, x.z, x.y, x.w, 0);
    }
  }

  // acc += this times the query.
  __device__ __forceinline__ void Multiply(int32_t chunk, const Query<T>& q,
                                           float (&even)[T::kNTiles][4],
                                           float (&odd)[T::kNTiles][4]) const {
#pragma unroll
    for (int32_t n = 0; n < T::kNTiles; ++n) {
      const uint4 b = q.Get(n, chunk);
      Mma<T>(even[n], a[0], a[1], a[2], a[3], b.x, b.y);
      if (chunk < T::kChunks) Mma<T>(odd[n], a[4], a[5], a[6], a[7], b.z, b.w);
    }
  }

 private:
  // A k-step's codes of tokens g and g + 8.
  __device__ __forceinline__ void TakeCodes(uint32_t g, uint32_t g_8, int32_t first) {
    const Expanded x = Expand(g);
    const Expanded y = Expand(g_8);
    Take(x.first, y.first, x.last, y.last, first);
  }
  __device__ __forceinline__ void Take(uint32_t x, uint32_t y, uint32_t z, uint32_t w,
                                       int32_t first) {
    a[first] = x;
    a[first + 1] = y;
    a[first + 2] = z;
    a[first + 3] = w;
  }
};

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
    KeyChunk<T> keys;
    keys.Load(tile, chunk, lane);
    Add(keys, chunk, q);
  }
  __device__ __forceinline__ void Add(const KeyChunk<T>& keys, int32_t chunk, const Query<T>& q) {
    if constexpr (kTwoChains) {
      keys.Multiply(chunk, q, even, odd);
    } else {
      keys.Multiply(chunk, q, even, even);
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

// Clears what no column sees in a tile's V in shared memory: it may be NaN, and 0 * NaN would
// spread. Each lane clears what it will load itself.
template <class T>
__device__ __forceinline__ void ClearUnseenV(uint8_t* v, int32_t lane, int2 seen) {
  constexpr uint32_t kEven = T::kFp8 ? 0x00FF00FFU : 0x0000FFFFU;  // of a word: of token 2t
  uint32_t keep[2];  // of words of tokens 2t, 2t + 1 and of those + 8
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    const int32_t even = 2 * (lane % 4) + 8 * i;
    keep[i] = (even >= seen.x && even < seen.y ? kEven : 0U) |
              (even + 1 >= seen.x && even + 1 < seen.y ? ~kEven : 0U);
  }
  constexpr int32_t kGroups = T::kFp8 ? T::kChunks : T::kDimTiles;  // of 512 bytes
#pragma unroll
  for (int32_t group = 0; group < kGroups; ++group) {
    uint4& x = reinterpret_cast<uint4*>(v)[group * kWarpLanes + lane];
    const uint32_t second = T::kFp8 ? keep[1] : keep[0];
    const uint32_t third = T::kFp8 ? keep[0] : keep[1];
    x = {x.x & keep[0], x.y & second, x.z & third, x.w & keep[1]};
  }
  if constexpr (T::kFp8 && T::kHalfChunk) {
    uint2& x = reinterpret_cast<uint2*>(v + kGroups * 512)[lane];
    x = {x.x & keep[0], x.y & keep[1]};
  }
}

// Weights of a tile's tokens g and g + 8 times v_scale: P as mma's B, columns g, tokens 2t, 2t + 1
// and those + 8. s: from CountScores.
template <class T>
__device__ __forceinline__ void WeightsOfTile(const float (&s)[T::kNTiles][4],
                                              const float (&scale)[2], Accumulator<T>& acc,
                                              uint32_t (&p)[T::kNTiles][2]) {
#pragma unroll
  for (int32_t n = 0; n < T::kNTiles; ++n) {
    float w[4];
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      w[i] = Exp2(s[n][i]);
      acc.sum[n][i % 2] += w[i];
      if constexpr (T::kFp8) w[i] *= scale[i / 2];
    }
    p[n][0] = Transpose8x8(T::kFp8 ? PackF16(w[0], w[1]) : PackBf16(w[0], w[1]));
    p[n][1] = Transpose8x8(T::kFp8 ? PackF16(w[2], w[3]) : PackBf16(w[2], w[3]));
  }
}

// A lane's codes of a chunk of V as mma's A, two M tiles.
__device__ __forceinline__ void ExpandChunk(uint4 codes, uint32_t (&a)[8]) {
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) {
    const Expanded x = Expand(words[i]);
    a[2 * i] = x.first;
    a[2 * i + 1] = x.last;
  }
}

// A lane's part of a chunk of V as mma's A, two M tiles; chunk kChunks is the half one.
template <class T>
__device__ __forceinline__ void LoadVChunk(const uint8_t* v, int32_t c, int32_t lane,
                                           uint32_t (&a)[8]) {
  const uint8_t* chunk = v + c * kChunkDims * kTileTokens * (T::kFp8 ? 1 : 2);
  const bool whole = c < T::kChunks;
  if constexpr (T::kFp8) {
    const uint4 x = whole ? reinterpret_cast<const uint4*>(chunk)[lane] : uint4{};
    const uint2 y = whole ? uint2{x.x, x.y} : reinterpret_cast<const uint2*>(chunk)[lane];
    ExpandChunk({y.x, y.y, x.z, x.w}, a);
  } else {
    const uint4 x = reinterpret_cast<const uint4*>(chunk)[lane];
    const uint4 y = whole ? reinterpret_cast<const uint4*>(chunk)[kWarpLanes + lane] : uint4{};
    const uint32_t words[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
#pragma unroll
    for (int32_t i = 0; i < 8; ++i) a[i] = words[i];
  }
}

// o += V P for one chunk of dimensions.
template <class T>
__device__ __forceinline__ void AccumulateChunk(const uint8_t* v, int32_t c, int32_t lane,
                                                const uint32_t (&p)[T::kNTiles][2],
                                                Accumulator<T>& acc) {
  const bool whole = c < T::kChunks;
  uint32_t a[8];
  LoadVChunk<T>(v, c, lane, a);
#pragma unroll
  for (int32_t n = 0; n < T::kNTiles; ++n) {
    Mma<T>(acc.o[n][2 * c], a[0], a[1], a[2], a[3], p[n][0], p[n][1]);
    if (whole) {
      Mma<T>(acc.o[n][whole ? 2 * c + 1 : 2 * c], a[4], a[5], a[6], a[7], p[n][0], p[n][1]);
    }
  }
}

// K of the tile that a warp begins with, expanded while its query is on its way.
template <class T>
struct FirstKeys {
  static constexpr int32_t kParts = T::kChunks + (T::kHalfChunk ? 1 : 0);
  KeyChunk<T> chunks[kParts];

  __device__ __forceinline__ void Load(const uint8_t* tile, int32_t lane) {
#pragma unroll
    for (int32_t c = 0; c < kParts; ++c) chunks[c].Load(tile, c, lane);
    __syncwarp();  // else the compiler expands each code where it is used, behind the query
  }
};

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
  // keys: of the first of them.
  __device__ __forceinline__ void Begin(uint8_t* tiles, const FirstKeys<T>& keys, int32_t lane,
                                        const Query<T>& q) {
    Products<T> products[kTiles];
#pragma unroll
    for (int32_t m = 0; m < kTiles; ++m) {
      products[m].Clear();
#pragma unroll
      for (int32_t c = 0; c < kParts; ++c) {
        if (m == 0) {
          products[m].Add(keys.chunks[c], c, q);
        } else {
          products[m].Add(tiles + m * T::kTileBytes, c, lane, q);
        }
      }
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
      WeightsOfTile<T>(scores_.s[m], scores_.v_scale[m], acc, p);
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
      WeightsOfTile<T>(scores_.s[m], scores_.v_scale[m], acc, p);
#pragma unroll
      for (int32_t c = 0; c < kParts; ++c) AccumulateChunk<T>(V(m), c, lane, p, acc);
    }
  }

  // From products to scores above their origins; after Begin or Turn. token: the tiles'
  // first. is_edge: some of their tokens are unseen by some column, or were never copied; seen()
  // says which. kFirst: acc is as Clear left it.
  template <bool kFirst, class Seen>
  __device__ __forceinline__ void Score(int32_t token, bool is_edge, int32_t lane,
                                        const ScoreTerms& terms, const Seen& seen,
                                        Accumulator<T>& acc) {
#pragma unroll
    for (int32_t m = 0; m < kTiles; ++m) {
      float factor[2];
      ScoreFactors<T>(tiles_ + m * T::kTileBytes, lane, terms, factor);
      products_[m].Scale(factor, scores_.s[m]);
      LoadVScales<T>(tiles_ + m * T::kTileBytes, lane, scores_.v_scale[m]);
    }
    if (terms.cap != 0.0F) {
#pragma unroll
      for (int32_t m = 0; m < kTiles; ++m) CapScores<T>(terms, scores_.s[m]);
    }
    if (is_edge) Mask(token, lane, seen());
    PlaceOrigins<T, kFirst>(scores_, acc);
    CountScores<T>(acc, scores_);
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
      MaskScores<T>(token + m * kTileTokens, lane, seen, scores_.s[m]);
      const int2 of_tile = SeenOfTile(token + m * kTileTokens, seen);
      if constexpr (T::kFp8) {
#pragma unroll
        for (int32_t i = 0; i < 2; ++i) {
          const int32_t at = lane / 4 + 8 * i;
          if (at < of_tile.x || at >= of_tile.y) scores_.v_scale[m][i] = 0.0F;
        }
      }
      ClearUnseenV<T>(V(m), lane, of_tile);
    }
  }

  uint8_t* tiles_;
  Products<T> products_[kTiles];  // from Begin or Turn to Score
  Scores<T> scores_;              // from Score on, above the origins
};

}  // namespace fp8kvd::kernels::cuda
