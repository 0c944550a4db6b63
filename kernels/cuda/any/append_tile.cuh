// kernels/cuda/any/append_tile.cuh: a warp quantises the K or the V of one tile and stores it: up
// to 16 tokens of one KV head.
//
// Its lanes load what they store: page_layout.h gives each lane 16 bytes of a chunk of 32
// dimensions, and those come from two tokens' 16 bytes (K) or four tokens' 8 bytes (V). So rows go
// from registers to their place, through no shared memory. Of part of a tile each token's own bytes
// are written, since no two tokens share a byte. Bytes: each row once, each tile once.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_fp8.h>

#include "kernels/cuda/any/append.h"
#include "kernels/cuda/any/ptx.cuh"
#include "kernels/cuda/page_layout.h"
#include "kernels/cuda/row_scale.h"
#include "kernels/e4m3.h"

namespace fp8kvd::kernels::cuda {

// The lanes' part of a tile. Lane 4 g + t has, of each chunk, of K the tokens g and g + 8 and their
// dimensions 8 t ... 8 t + 7; of V the tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9 and their dimensions
// 4 g ... 4 g + 3; of half a chunk at the end half as many. Two values a word.
template <bool kIsKey, int32_t kHeadDim>
struct TilePart {
  static constexpr int32_t kRows = kIsKey ? 2 : 4;
  static constexpr int32_t kWords = kHeadDim / (4 * kRows);  // of a row
  static constexpr int32_t kChunks = kHeadDim / kChunkDims;
  static constexpr int32_t kChunkWords = kIsKey ? 4 : 2;  // of a row
  static constexpr bool kHalfChunk = kHeadDim % kChunkDims != 0;

  uint32_t words[kRows][kWords];

  __device__ __forceinline__ static int32_t Token(int32_t row, int32_t lane) {
    return kIsKey ? lane / 4 + 8 * row : 2 * (lane % 4) + row % 2 + 8 * (row / 2);
  }
};

struct AppendTarget {
  const uint16_t* from;  // the row of token `first`
  int64_t row_stride;    // elements
  int32_t first;         // tokens [first, end) of the tile
  int32_t end;
  uint8_t* to;

  __device__ __forceinline__ bool Has(int32_t token) const { return token >= first && token < end; }
};

template <bool kIsKey, int32_t kHeadDim>
__device__ __forceinline__ void LoadTile(const AppendTarget& tile, int32_t lane,
                                         TilePart<kIsKey, kHeadDim>& part) {
  using P = TilePart<kIsKey, kHeadDim>;
  const int32_t place = kIsKey ? lane % 4 : lane / 4;  // of the lane's dimensions in a chunk
#pragma unroll
  for (int32_t r = 0; r < P::kRows; ++r) {
    const int32_t token = P::Token(r, lane);
    const bool there = tile.Has(token);
    const uint16_t* row = tile.from + (token - tile.first) * tile.row_stride;
#pragma unroll
    for (int32_t c = 0; c < P::kChunks; ++c) {
      uint32_t* to = part.words[r] + c * P::kChunkWords;
      const uint16_t* from = row + c * kChunkDims + place * 2 * P::kChunkWords;
      if constexpr (kIsKey) {
        const uint4 x = there ? __ldg(reinterpret_cast<const uint4*>(from)) : uint4{};
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
      } else {
        const uint2 x = there ? __ldg(reinterpret_cast<const uint2*>(from)) : uint2{};
        to[0] = x.x, to[1] = x.y;
      }
    }
    if constexpr (P::kHalfChunk) {
      uint32_t* to = part.words[r] + P::kChunks * P::kChunkWords;
      const uint16_t* from = row + P::kChunks * kChunkDims + place * P::kChunkWords;
      if constexpr (kIsKey) {
        const uint2 x = there ? __ldg(reinterpret_cast<const uint2*>(from)) : uint2{};
        to[0] = x.x, to[1] = x.y;
      } else {
        to[0] = there ? __ldg(reinterpret_cast<const uint32_t*>(from)) : 0U;
      }
    }
  }
}

__device__ __forceinline__ uint32_t LowHalves(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x5410);
}
__device__ __forceinline__ uint32_t HighHalves(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x7632);
}

// The largest magnitudes of rows r and r + 1, over all lanes that hold a part of them.
template <bool kIsKey, int32_t kHeadDim>
__device__ __forceinline__ uint32_t LargestOfTwoRows(const TilePart<kIsKey, kHeadDim>& part,
                                                     int32_t r) {
  uint32_t largest[2] = {0U, 0U};
#pragma unroll
  for (int32_t w = 0; w < TilePart<kIsKey, kHeadDim>::kWords; ++w) {
    largest[0] = MaxOfPairs(largest[0], part.words[r][w] & kNoSigns);
    largest[1] = MaxOfPairs(largest[1], part.words[r + 1][w] & kNoSigns);
  }
  uint32_t both = MaxOfPairs(LowHalves(largest[0], largest[1]), HighHalves(largest[0], largest[1]));
  constexpr int32_t kFirst = kIsKey ? 1 : 4;  // lanes that differ in t, or in g
  constexpr int32_t kEnd = kIsKey ? 4 : 32;
#pragma unroll
  for (int32_t step = kFirst; step < kEnd; step *= 2) {
    both = MaxOfPairs(both, __shfl_xor_sync(kAllLanes, both, step));
  }
  return both;
}

// Below 1 / x, by three ulps at most.
__device__ __forceinline__ float ReciprocalBelow(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));  // off by an ulp at most
  return __uint_as_float(__float_as_uint(y) - 2U);
}

// A row that lies beyond what RowScale takes: scaled by a power of two in place, or zeros.
template <int32_t kWords>
__device__ __forceinline__ RowScale ScaleOfFarRow(float amax, uint32_t (&words)[kWords]) {
  const float factor = PreFactor(amax);
  const __nv_bfloat162 factors = __float2bfloat162_rn(factor);
#pragma unroll
  for (uint32_t& word : words) {
    const __nv_bfloat162 scaled = __hmul2(*reinterpret_cast<__nv_bfloat162*>(&word), factors);
    word = amax == 0.0F ? 0U : *reinterpret_cast<const uint32_t*>(&scaled);
  }
  const float scale = OverE4m3Max(amax);
  const float scaled = scale * factor;
  RowScale row = amax == 0.0F ? RowScale{} : RowScaleFrom(scaled, ReciprocalBelow(scaled));
  row.scale = scale;
  return row;
}

template <int32_t kWords>
__device__ __forceinline__ RowScale ScaleOf(float amax, uint32_t (&words)[kWords]) {
  if (PreFactor(amax) != 1.0F) return ScaleOfFarRow(amax, words);
  const float scale = OverE4m3Max(amax);
  return RowScaleFrom(scale, ReciprocalBelow(scale));
}

// Codes of `low` and `high`, as the lower and the upper byte of 16 bits.
__device__ __forceinline__ uint32_t EncodePair(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0,%1,%2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return static_cast<uint32_t>(E4m3Encode(high)) << 8 | E4m3Encode(low);
#endif
}

// The code words of a chunk (kWords 4, or 2 of half a chunk) in their order.
template <int32_t kHeadDim, int32_t kCount>
__device__ __forceinline__ void CodesOf(const TilePart<true, kHeadDim>& part,
                                        const RowScale (&scales)[2], int32_t chunk,
                                        uint32_t (&out)[kCount]) {
#pragma unroll
  for (int32_t i = 0; i < kCount; ++i) {
    const int32_t r = i / (kCount / 2);
    const uint32_t* x = part.words[r] + 4 * chunk + i % (kCount / 2) * 2;
    const auto q = [&](float value) { return Quotient(value, scales[r]); };
    const uint32_t first = EncodePair(q(LowValue(x[0])), q(HighValue(x[0])));
    const uint32_t last = EncodePair(q(LowValue(x[1])), q(HighValue(x[1])));
    out[i] = first | last << 16;
  }
}
template <int32_t kHeadDim, int32_t kCount>
__device__ __forceinline__ void CodesOf(const TilePart<false, kHeadDim>& part,
                                        const RowScale (&scales)[4], int32_t chunk,
                                        uint32_t (&out)[kCount]) {
#pragma unroll
  for (int32_t i = 0; i < kCount; ++i) {
    const int32_t upper_tokens = 2 * (i % 2);
    const int32_t m_tile = i / 2;
    const RowScale& even = scales[upper_tokens];
    const RowScale& odd = scales[upper_tokens + 1];
    const uint32_t x = part.words[upper_tokens][2 * chunk + m_tile];
    const uint32_t y = part.words[upper_tokens + 1][2 * chunk + m_tile];
    const uint32_t first = EncodePair(Quotient(LowValue(x), even), Quotient(LowValue(y), odd));
    const uint32_t last = EncodePair(Quotient(HighValue(x), even), Quotient(HighValue(y), odd));
    out[i] = first | last << 16;
  }
}

// The bf16 words of a chunk's group g of 512 bytes, or of half a chunk (g 0), in their order.
template <int32_t kHeadDim>
__device__ __forceinline__ void Bf16Of(const TilePart<true, kHeadDim>& part, int32_t chunk,
                                       int32_t group, uint32_t (&out)[4]) {
  const bool whole = chunk < TilePart<true, kHeadDim>::kChunks;
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) {
    const int32_t r = whole ? group : i / 2;
    out[i] = part.words[r][4 * chunk + (whole ? i : i % 2)];
  }
}
template <int32_t kHeadDim>
__device__ __forceinline__ void Bf16Of(const TilePart<false, kHeadDim>& part, int32_t chunk,
                                       int32_t group, uint32_t (&out)[4]) {
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) {
    const uint32_t x = part.words[2 * (i / 2)][2 * chunk + group];
    const uint32_t y = part.words[2 * (i / 2) + 1][2 * chunk + group];
    out[i] = i % 2 == 0 ? LowHalves(x, y) : HighHalves(x, y);
  }
}

// Writes a lane's words at once, or of each only what belongs to tokens of the tile. row_of(i): the
// row of word i (of V: of its even elements; its odd ones are the next row's).
template <Precision kPrecision, bool kIsKey, int32_t kHeadDim, int32_t kCount, class RowOf>
__device__ __forceinline__ void StoreTileWords(const AppendTarget& tile, int32_t lane, uint8_t* to,
                                               const uint32_t (&words)[kCount],
                                               const RowOf& row_of) {
  if (tile.end - tile.first == kTileTokens) {
    if constexpr (kCount == 4) {
      *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
    } else {
      *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
    }
    return;
  }
#pragma unroll
  for (int32_t i = 0; i < kCount; ++i) {
    uint8_t* at = to + 4 * i;
    const int32_t row = row_of(i);
    using P = TilePart<kIsKey, kHeadDim>;
    if constexpr (kIsKey) {
      if (tile.Has(P::Token(row, lane))) *reinterpret_cast<uint32_t*>(at) = words[i];
    } else {
      using Element = std::conditional_t<kPrecision == Precision::kFp8Kv, uint8_t, uint16_t>;
      constexpr int32_t kElements = 4 / sizeof(Element);
      auto* elements = reinterpret_cast<Element*>(at);
#pragma unroll
      for (int32_t e = 0; e < kElements; ++e) {
        if (!tile.Has(P::Token(row + e % 2, lane))) continue;
        elements[e] = static_cast<Element>(words[i] >> (e * 32 / kElements));
      }
    }
  }
}

template <bool kIsKey, int32_t kHeadDim>
__device__ __forceinline__ void StoreCodes(const AppendTarget& tile, int32_t lane,
                                           TilePart<kIsKey, kHeadDim>& part) {
  using P = TilePart<kIsKey, kHeadDim>;
  constexpr int32_t kOperandBytes = TileOperandBytes(Precision::kFp8Kv, kHeadDim);
  constexpr int32_t kScales = kIsKey ? TileKScales(kHeadDim) : TileVScales(kHeadDim);
  RowScale scales[P::kRows];
#pragma unroll
  for (int32_t r = 0; r < P::kRows; r += 2) {
    const uint32_t largest = LargestOfTwoRows(part, r);
    scales[r] = ScaleOf(LowValue(largest), part.words[r]);
    scales[r + 1] = ScaleOf(HighValue(largest), part.words[r + 1]);
  }
  uint32_t codes[P::kChunks][4];
  uint32_t half_chunk[2] = {0U, 0U};
#pragma unroll
  for (int32_t c = 0; c < P::kChunks; ++c) CodesOf(part, scales, c, codes[c]);
  if constexpr (P::kHalfChunk) CodesOf(part, scales, P::kChunks, half_chunk);

  WaitForPreviousLaunch();
  if ((kIsKey ? lane % 4 : lane / 4) == 0) {
#pragma unroll
    for (int32_t r = 0; r < P::kRows; ++r) {
      const int32_t token = P::Token(r, lane);
      if (!tile.Has(token)) continue;
      *reinterpret_cast<float*>(tile.to + kScales + 4 * token) = scales[r].scale;
    }
  }
  uint8_t* to = tile.to + (kIsKey ? 0 : kOperandBytes);
#pragma unroll
  for (int32_t c = 0; c < P::kChunks; ++c) {
    StoreTileWords<Precision::kFp8Kv, kIsKey, kHeadDim>(
        tile, lane, to + c * 512 + lane * 16, codes[c],
        [](int32_t i) { return kIsKey ? i / 2 : 2 * (i % 2); });
  }
  if constexpr (P::kHalfChunk) {
    StoreTileWords<Precision::kFp8Kv, kIsKey, kHeadDim>(
        tile, lane, to + P::kChunks * 512 + lane * 8, half_chunk,
        [](int32_t i) { return kIsKey ? i : 2 * i; });
  }
}

template <bool kIsKey, int32_t kHeadDim>
__device__ __forceinline__ void StoreBf16(const AppendTarget& tile, int32_t lane,
                                          const TilePart<kIsKey, kHeadDim>& part) {
  using P = TilePart<kIsKey, kHeadDim>;
  uint8_t* to = tile.to + (kIsKey ? 0 : TileOperandBytes(Precision::kBf16, kHeadDim)) + lane * 16;
  WaitForPreviousLaunch();
#pragma unroll
  for (int32_t c = 0; c < P::kChunks; ++c) {
#pragma unroll
    for (int32_t group = 0; group < 2; ++group) {
      uint32_t out[4];
      Bf16Of(part, c, group, out);
      StoreTileWords<Precision::kBf16, kIsKey, kHeadDim>(
          tile, lane, to + c * 1024 + group * 512, out,
          [=](int32_t i) { return kIsKey ? group : 2 * (i / 2); });
    }
  }
  if constexpr (P::kHalfChunk) {
    uint32_t out[4];
    Bf16Of(part, P::kChunks, 0, out);
    StoreTileWords<Precision::kBf16, kIsKey, kHeadDim>(
        tile, lane, to + P::kChunks * 1024, out,
        [](int32_t i) { return kIsKey ? i / 2 : 2 * (i / 2); });
  }
}

// Waits for the launches before only when it has all that it writes: rows are the caller's, not
// theirs.
template <Precision kPrecision, int32_t kHeadDim, bool kIsKey>
__device__ __forceinline__ void AppendTile(const AppendTarget& tile, int32_t lane) {
  TilePart<kIsKey, kHeadDim> part;
  LoadTile(tile, lane, part);
  if constexpr (kPrecision == Precision::kFp8Kv) {
    StoreCodes(tile, lane, part);
  } else {
    StoreBf16(tile, lane, part);
  }
}

// A row's tiles, K and V in turn; warp `at` of `warps` that share them.
template <Precision kPrecision, int32_t kHeadDim>
__device__ __forceinline__ void AppendTiles(const AppendRow& row, int32_t at, int32_t warps) {
  constexpr int32_t kTileBytes = TileBytes(kPrecision, kHeadDim);
  const int32_t lane = threadIdx.x % kWarpLanes;
  const int32_t tile_first = row.pos / kTileTokens;
  const int32_t tiles_touched = (row.pos + row.n - 1) / kTileTokens - tile_first + 1;
  const int32_t tasks = 2 * tiles_touched * row.kv_heads;
  for (int32_t task = at; task < tasks; task += warps) {
    const int32_t kv_head = task / 2 % row.kv_heads;
    const int32_t index = tile_first + task / 2 / row.kv_heads;
    const int32_t pos = max(row.pos, index * kTileTokens);
    const int32_t end = min(row.pos + row.n, (index + 1) * kTileTokens);
    const int64_t row_stride = static_cast<int64_t>(row.kv_heads) * kHeadDim;
    const int64_t element = (pos - row.pos) * row_stride + kv_head * kHeadDim;
    const int64_t page = row.block_table[index / kTilesPerPage];
    AppendTarget tile;
    tile.from = (task % 2 == 0 ? row.k : row.v) + element;
    tile.row_stride = row_stride;
    tile.first = pos % kTileTokens;
    tile.end = tile.first + (end - pos);
    tile.to = row.base + page * row.page_stride +
              static_cast<int64_t>(kv_head) * BlockBytesOf(kPrecision, kHeadDim) +
              static_cast<int64_t>(index % kTilesPerPage) * kTileBytes;
    if (task % 2 == 0) {
      AppendTile<kPrecision, kHeadDim, true>(tile, lane);
    } else {
      AppendTile<kPrecision, kHeadDim, false>(tile, lane);
    }
  }
}

}  // namespace fp8kvd::kernels::cuda
