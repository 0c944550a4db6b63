// kernels/cuda/any/decode/traits.h: the numbers that a decode kernel is made from, for the kernel
// and for decode_table.cc. decode_work.h has the words: pair, unit, item, piece.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/decode_work.h"
#include "kernels/cuda/page_layout.h"

namespace fp8kvd::kernels::cuda {

// Tiles of a unit: 1, 2 or 4, so that a copy is 5 to 16 KB and never crosses a page.
constexpr int32_t UnitTiles(Precision precision, int32_t head_dim) {
  constexpr int32_t kCopyBytesMax = 9 * 1024;
  const int32_t tile = TileBytes(precision, head_dim);
  return 4 * tile <= kCopyBytesMax ? 4 : 2 * tile <= kCopyBytesMax ? 2 : 1;
}

template <Precision precision, int32_t head_dim, int32_t columns,
          int32_t unit_tiles = UnitTiles(precision, head_dim)>
struct DecodeTraits {
  static constexpr Precision kPrecision = precision;
  static constexpr bool kFp8 = precision == Precision::kFp8Kv;
  static constexpr int32_t kHeadDim = head_dim;
  static constexpr int32_t kColumns = columns;
  static constexpr int32_t kNTiles = columns / 8;
  static constexpr int32_t kDimTiles = head_dim / 16;
  static constexpr int32_t kChunks = head_dim / kChunkDims;
  static constexpr bool kHalfChunk = head_dim % kChunkDims != 0;

  // Query columns are M of mma, not N (many_columns.cuh).
  static constexpr bool kColumnsAreM = kFp8 && columns >= 16;

  static constexpr int32_t kTileBytes = TileBytes(precision, head_dim);
  static constexpr int32_t kVOffset = TileOperandBytes(precision, head_dim);
  static constexpr int32_t kUnitTiles = unit_tiles;
  static constexpr int32_t kUnitTokens = kUnitTiles * kTileTokens;
  static constexpr int32_t kWarpsMax = 8;
  // Warps that read a ring together, and how many such workers a CTA has where units are cut.
  static constexpr int32_t kWorkerWarps = 1;
  static constexpr int32_t kWorkersMax = kWarpsMax;
  static constexpr int32_t kScratchBytes = 0;  // of a worker, beside its ring and its query
  static constexpr Grain kGrain = {kUnitTokens, kColumns};
  static constexpr int32_t kUnitBytes = kUnitTiles * kTileBytes;
  static constexpr int32_t kUnitsPerPage = kPageTokens / kUnitTokens;

  static constexpr int32_t kPieceStride = head_dim + 4;
  static constexpr int32_t kPieceBytes = columns * kPieceStride * 4;
  // Registers of a lane: the output takes columns * head_dim / 32, the query half of that, the rest
  // about 60, and there are 255. So a large query waits in shared memory, and where columns are N
  // fewer tiles are in work.
  static constexpr bool kQueryInShared = columns * head_dim >= 32 * 80;
  static constexpr int32_t kQueryBytes = columns * ((head_dim + kChunkDims - 1) / kChunkDims) * 64;
  static constexpr int32_t kTilesAtOnce = kColumnsAreM                ? (kUnitTiles < 2 ? 1 : 2)
                                          : kQueryInShared            ? 1
                                          : kUnitTiles * kNTiles <= 4 ? kUnitTiles
                                                                      : kUnitTiles / 2;
  // Products of the next tiles are taken while these are accumulated, where registers suffice. Not
  // in fp8_kv: that much code costs short work more than it gains long work.
  static constexpr bool kTurns = columns == 8 && !kFp8;
  // Warps of an even cut keep together (pace.cuh). In bf16 that costs 1 %, and more columns have no
  // register to spare for it.
  static constexpr bool kPaced = columns == 8 && kFp8;
  // Items of batch_invariant are added up as they come, where registers suffice (join_items.cuh).
  static constexpr bool kFoldsItems = columns * head_dim < 32 * 128;
  // Two CTAs of a pairs launch have room on a multiprocessor where they are small enough.
  static constexpr int32_t kPairCtas = columns == 8 && head_dim <= 128 ? 2 : 1;

  static_assert(columns % 8 == 0 && head_dim % 16 == 0);
  static_assert(columns * head_dim <= 32 * 128, "the output of a pair stays in registers");
  static_assert(kTileBytes % 16 == 0, "bulk copies and 16-byte loads");
};

// For the cut of 17 to 32 query columns in fp8_kv on Hopper: four warps, a warpgroup, share units
// of a page each (sm90/decode/wide.cuh, decision 0030).
template <class T>
class WideAttends;
struct WideTraits : DecodeTraits<Precision::kFp8Kv, 128, 32, kTilesPerPage> {
  using Attends = WideAttends<WideTraits>;
  static constexpr int32_t kWorkerWarps = kTilesPerPage;
  static constexpr int32_t kWorkersMax = 3;
  static constexpr int32_t kScratchBytes = 9 * 1024;  // WideShared
  static constexpr bool kFoldsItems = false;
};

// For pairs that have a cluster each: units small enough that short ones give each warp one.
template <Precision precision, int32_t head_dim, int32_t columns>
using PairsTraits =
    DecodeTraits<precision, head_dim, columns, (UnitTiles(precision, head_dim) < 2 ? 1 : 2)>;

// For pairs of a few tiles, where more warps are worth more than what a warp gains by two tiles at
// once: in fp8_kv units of one.
template <Precision precision, int32_t head_dim, int32_t columns>
using FewTilesTraits = std::conditional_t<precision == Precision::kFp8Kv,
                                          DecodeTraits<precision, head_dim, columns, 1>,
                                          PairsTraits<precision, head_dim, columns>>;

}  // namespace fp8kvd::kernels::cuda
