// kernels/cuda/page_layout.h: what stands where inside one block (one page, layer and KV head) of
// the CUDA backend. Append writes it, decode reads it, export and tests find an element through it;
// no other file knows it. Plain arithmetic, for host and device.
//
// A block is four tiles of 16 tokens, one after the other, so that any run of tiles is one copy:
//     tile:  K fragments | V fragments | 16 k_scales | 16 v_scales      (no scales in bf16)
// Fragments are what the lanes of a warp feed to mma.m16n8k16 as its A operand (or, halved, as two
// B operands), in the order in which they load them: 16 bytes a lane, lane after lane, so that
// loads meet no bank twice and need no shuffling. Below, lane = 4 g + t (g 0..7, t 0..3) and a
// chunk is 32 dimensions; head dimensions that leave 16 over end with half a chunk.
//
// K (tokens are M, dimensions are K). Lane (g, t) holds tokens g and g + 8 of the tile and, of
// chunk
//   c, the dimensions 32 c + 8 t ... + 7: two k-steps of four. The order of dimensions inside a
//   product does not matter as long as the query is loaded in the same one.
// V (dimensions are M, tokens are K). Lane (g, t) holds, of chunk c, the dimensions 32 c + 4 g ...
// + 3
//   (rows g and g + 8 of two M tiles) and the tokens 2t, 2t + 1, 2t + 8, 2t + 9.
//
// bf16. An element is a 16-bit half of a register; a chunk is two groups of 512 bytes.
// fp8_kv. A word has four codes, a byte each: two neighbours of one register of the operand, then
//   two of the next one, so that each half of the word becomes a register (expand.cuh).
#pragma once

#include <cstdint>

#include "config/base/geometry.h"
#include "config/base/limits.h"
#include "kernels/host_device.h"

namespace fp8kvd::kernels::cuda {

inline constexpr int32_t kTileTokens = 16;
inline constexpr int32_t kTilesPerPage = kPageTokens / kTileTokens;
inline constexpr int32_t kChunkDims = 32;

// Bytes of K, or of V, of one tile without scales.
FP8KVD_HOST_DEVICE constexpr int32_t TileOperandBytes(Precision precision, int32_t head_dim) {
  return kTileTokens * head_dim * (precision == Precision::kFp8Kv ? 1 : 2);
}

FP8KVD_HOST_DEVICE constexpr int32_t TileBytes(Precision precision, int32_t head_dim) {
  const int32_t scales = precision == Precision::kFp8Kv ? 2 * kTileTokens * int32_t{4} : 0;
  return 2 * TileOperandBytes(precision, head_dim) + scales;
}

FP8KVD_HOST_DEVICE constexpr int32_t BlockBytesOf(Precision precision, int32_t head_dim) {
  return kTilesPerPage * TileBytes(precision, head_dim);
}

// Where the scales of a tile's 16 tokens start: of K, and of V. fp8_kv only.
FP8KVD_HOST_DEVICE constexpr int32_t TileKScales(int32_t head_dim) {
  return 2 * TileOperandBytes(Precision::kFp8Kv, head_dim);
}
FP8KVD_HOST_DEVICE constexpr int32_t TileVScales(int32_t head_dim) {
  return TileKScales(head_dim) + kTileTokens * int32_t{4};
}

// Byte offset, in the tile's K, of dimension `dim` of its token `token` (0..15): of the code, or of
// the bf16.
template <Precision kPrecision>
FP8KVD_HOST_DEVICE constexpr int32_t KPlace(int32_t head_dim, int32_t token, int32_t dim) {
  const int32_t chunk = dim / kChunkDims;
  const bool whole = (chunk + 1) * kChunkDims <= head_dim;
  const int32_t dims_per_lane = whole ? 8 : 4;  // of one token
  const int32_t in_chunk = dim % kChunkDims;
  const int32_t lane = 4 * (token % 8) + in_chunk / dims_per_lane;
  const int32_t upper = token / 8;                         // token g + 8
  const int32_t i = in_chunk % dims_per_lane;              // 0..7 or 0..3
  const int32_t start = chunk * kChunkDims * kTileTokens;  // in elements
  if (kPrecision == Precision::kFp8Kv) {
    return start + lane * 2 * dims_per_lane + upper * dims_per_lane + i;
  }
  // Whole chunk: 16 bytes a lane for token g, then a second group for token g + 8.
  // Half a chunk: 8 bytes for token g and 8 for token g + 8 in the same group.
  const int32_t place = whole ? upper * 512 + lane * 16 : lane * 16 + upper * 8;
  return 2 * start + place + 2 * i;
}

// The same in the tile's V, from the start of V.
template <Precision kPrecision>
FP8KVD_HOST_DEVICE constexpr int32_t VPlace(int32_t head_dim, int32_t token, int32_t dim) {
  const int32_t chunk = dim / kChunkDims;
  const bool whole = (chunk + 1) * kChunkDims <= head_dim;
  const int32_t dims_per_lane = whole ? 4 : 2;
  const int32_t in_chunk = dim % kChunkDims;
  const int32_t lane = 4 * (in_chunk / dims_per_lane) + (token % 8) / 2;
  const int32_t upper = token / 8;  // tokens 2t + 8, 2t + 9
  const int32_t half = token % 2;
  const int32_t m_tile = (in_chunk % dims_per_lane) / 2;  // 0 or 1 of the chunk's two M tiles
  const int32_t row_upper = in_chunk % 2;                 // row g + 8 of the M tile
  const int32_t start = chunk * kChunkDims * kTileTokens;
  if (kPrecision == Precision::kFp8Kv) {
    const int32_t word = m_tile * 2 + upper;
    return start + lane * 4 * dims_per_lane + 4 * word + 2 * row_upper + half;
  }
  const int32_t word = upper * 2 + row_upper;  // a0 a1 a2 a3 of mma's A
  return 2 * start + m_tile * 512 + lane * 16 + 4 * word + 2 * half;
}

}  // namespace fp8kvd::kernels::cuda
