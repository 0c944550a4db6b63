// One warp quantises one tile: up to 16 tokens of one KV head, K and V. A warp's lanes split into
// groups of one row each, 8 dimensions a lane. A whole tile is put together in shared memory and
// written in 16-byte pieces; of part of a tile each token's own bytes are written, since no two
// tokens share a byte (page_layout.h).
#include <cuda_fp8.h>

#include "kernels/cuda/any/append.h"
#include "kernels/cuda/any/launch.h"
#include "kernels/cuda/any/ptx.cuh"
#include "kernels/cuda/page_layout.h"
#include "kernels/e4m3.h"

namespace fp8kvd::kernels::cuda {
namespace {

constexpr int32_t kLaneDims = 8;

// Warps of a block: four, or as many as have their tiles in 48 KiB of shared memory.
constexpr int32_t WarpsFor(int32_t tile_bytes) {
  return 4 * tile_bytes <= 48 * 1024 ? 4 : 48 * 1024 / tile_bytes;
}

// Lanes that share a row: enough for head_dim, and a power of two for the shuffles.
constexpr int32_t RowLanes(int32_t head_dim) {
  return head_dim <= 64 ? 8 : head_dim <= 128 ? 16 : 32;
}

__device__ __forceinline__ uint32_t Encode(float value) {
#if __CUDA_ARCH__ >= 890
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
#else
  return E4m3Encode(value);
#endif
}

// 8 values of a row.
struct Piece {
  uint32_t words[kLaneDims / 2];

  __device__ uint32_t Bits(int32_t i) const { return (words[i / 2] >> (16 * (i % 2))) & 0xFFFFU; }
  __device__ float Value(int32_t i) const { return __uint_as_float(Bits(i) << 16); }
};

__device__ __forceinline__ Piece LoadPiece(const uint16_t* row, int32_t dim, bool there) {
  if (!there) return Piece{};
  const uint4 x = __ldg(reinterpret_cast<const uint4*>(row + dim));
  return {{x.x, x.y, x.z, x.w}};
}

// value / scale, or something that Encode rounds to the same code: value * inverse is off by two
// units in the last place at most, which matters only where a code ends in the middle (its lower 20
// bits are 0x80000), or where codes are subnormal and end elsewhere.
__device__ __noinline__ float ExactQuotient(float value, float scale) {
  return __fdiv_rn(value, scale);
}
__device__ __forceinline__ float Quotient(float value, float scale, float inverse) {
  const float near = value * inverse;
  const uint32_t from_middle = (__float_as_uint(near) & 0xFFFFFU) - (0x80000U - 4U);
  const bool safe = from_middle > 8U && fabsf(near) >= 0x1p-6F;
  return safe ? near : ExactQuotient(value, scale);
}

template <int32_t kHeadDim>
__device__ __forceinline__ float RowScale(const Piece& piece) {
  float largest = 0.0F;
#pragma unroll
  for (int32_t i = 0; i < kLaneDims; ++i) largest = fmaxf(largest, fabsf(piece.Value(i)));
#pragma unroll
  for (int32_t step = 1; step < RowLanes(kHeadDim); step *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
  }
  return __fdiv_rn(largest, kE4m3Max);
}

// A tile in shared memory lies there with its 16-byte pieces in another order within every KiB, so
// that the elements of a row, 64 or 128 bytes apart in V, meet different banks.
__device__ __forceinline__ int32_t Staggered(int32_t byte) {
  return byte ^ ((((byte >> 7) ^ (byte >> 10)) & 7) << 4);
}

// Where a tile is put together: in place, or in shared memory.
struct Target {
  uint8_t* bytes;
  bool staged;

  __device__ __forceinline__ uint8_t* At(int32_t byte) const {
    return bytes + (staged ? Staggered(byte) : byte);
  }
};

__device__ __forceinline__ void StoreHalf(uint8_t* at, uint32_t half) {
  *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(half);
}

// Writes 8 codes of one row, dimensions dim ... dim + 7 of token `token` of the tile.
template <int32_t kHeadDim>
__device__ __forceinline__ void PlaceCodes(const uint32_t (&code)[kLaneDims], bool is_key,
                                           int32_t token, int32_t dim, const Target& tile) {
  constexpr Precision kFp8 = Precision::kFp8Kv;
  if (is_key) {
#pragma unroll
    for (int32_t i = 0; i < kLaneDims; i += 4) {
      const uint32_t low = PlaceCode(code[i], false) | PlaceCode(code[i + 2], true);
      const uint32_t high = PlaceCode(code[i + 1], false) | PlaceCode(code[i + 3], true);
      uint8_t* at = tile.At(KPlace<kFp8>(kHeadDim, token, dim + i).byte);
      *reinterpret_cast<uint32_t*>(at) = low | (high << 16);
    }
  } else {
#pragma unroll
    for (int32_t i = 0; i < kLaneDims; i += 2) {
      const int32_t at =
          TileOperandBytes(kFp8, kHeadDim) + VPlace<kFp8>(kHeadDim, token, dim + i).byte;
      StoreHalf(tile.At(at), PlaceCode(code[i], false) | PlaceCode(code[i + 1], true));
    }
  }
}

template <int32_t kHeadDim>
__device__ __forceinline__ void PlaceBf16(const Piece& piece, bool is_key, int32_t token,
                                          int32_t dim, const Target& tile) {
  constexpr Precision kBf16 = Precision::kBf16;
  if (is_key) {
#pragma unroll
    for (int32_t i = 0; i < kLaneDims; i += 4) {
      uint8_t* at = tile.At(KPlace<kBf16>(kHeadDim, token, dim + i).byte);
      *reinterpret_cast<uint2*>(at) = {piece.words[i / 2], piece.words[i / 2 + 1]};
    }
  } else {
#pragma unroll
    for (int32_t i = 0; i < kLaneDims; ++i) {
      const int32_t at =
          TileOperandBytes(kBf16, kHeadDim) + VPlace<kBf16>(kHeadDim, token, dim + i).byte;
      StoreHalf(tile.At(at), piece.Bits(i));
    }
  }
}

// Tokens [first, end) of a tile, from rows that lie `row_stride` elements apart; k and v point at
// the row of token `first`.
struct TileRows {
  const uint16_t* k;
  const uint16_t* v;
  int64_t row_stride;
  int32_t first;
  int32_t end;
};

// One row's piece, quantised and placed. All lanes of the row call it.
template <Precision kPrecision, int32_t kHeadDim>
__device__ __forceinline__ void PlacePiece(const Piece& piece, bool there, bool is_key,
                                           int32_t token, int32_t dim, const Target& tile) {
  if constexpr (kPrecision == Precision::kFp8Kv) {
    const float scale = RowScale<kHeadDim>(piece);
    // Where the inverse would overflow, 0 sends every quotient the long way.
    const float inverse = scale >= 0x1p-100F ? __frcp_rn(scale) : 0.0F;
    uint32_t code[kLaneDims];
#pragma unroll
    for (int32_t i = 0; i < kLaneDims; ++i) {
      code[i] = scale == 0.0F ? 0U : Encode(Quotient(piece.Value(i), scale, inverse));
    }
    if (!there) return;
    PlaceCodes<kHeadDim>(code, is_key, token, dim, tile);
    if (dim == 0) {
      const int32_t scales = is_key ? TileKScales(kHeadDim) : TileVScales(kHeadDim);
      *reinterpret_cast<float*>(tile.At(scales + 4 * token)) = scale;
    }
  } else if (there) {
    PlaceBf16<kHeadDim>(piece, is_key, token, dim, tile);
  }
}

// Quantises the rows into `tile`, some rows under way while others are worked on. Waits for the
// launches before only when it has loaded what it can: rows are the caller's, not theirs.
template <Precision kPrecision, int32_t kHeadDim>
__device__ __forceinline__ void FillTile(const TileRows& rows, int32_t lane, const Target& tile) {
  constexpr int32_t kRowLanes = RowLanes(kHeadDim);
  constexpr int32_t kRowsAtOnce = kWarpLanes / kRowLanes;
  constexpr int32_t kLoads = 4;
  const int32_t dim = lane % kRowLanes * kLaneDims;
  const int32_t rows_count = 2 * (rows.end - rows.first);  // K and V of a token in turn
  for (int32_t start = 0; start < rows_count; start += kLoads * kRowsAtOnce) {
    Piece pieces[kLoads];
    const auto row_of = [&](int32_t load) { return start + load * kRowsAtOnce + lane / kRowLanes; };
#pragma unroll
    for (int32_t l = 0; l < kLoads; ++l) {
      const int32_t row = row_of(l);
      const uint16_t* from = (row % 2 == 0 ? rows.k : rows.v) + (row / 2) * rows.row_stride;
      pieces[l] = LoadPiece(from, dim, row < rows_count && dim < kHeadDim);
    }
    WaitForPreviousLaunch();
#pragma unroll
    for (int32_t l = 0; l < kLoads; ++l) {
      const int32_t row = row_of(l);
      if (start + l * kRowsAtOnce >= rows_count) break;
      PlacePiece<kPrecision, kHeadDim>(pieces[l], row < rows_count && dim < kHeadDim, row % 2 == 0,
                                       rows.first + row / 2, dim, tile);
    }
  }
}

template <Precision kPrecision, int32_t kHeadDim>
__global__ void AppendKernel(const AppendRow* rows, bool tables_settled) {
  constexpr int32_t kTileBytes = TileBytes(kPrecision, kHeadDim);
  constexpr int32_t kWarps = WarpsFor(kTileBytes);
  __shared__ __align__(16) uint8_t tiles[kWarps][kTileBytes];
  if (!tables_settled) WaitForPreviousLaunch();
  LetNextLaunchStart();
  const int32_t warp = threadIdx.x / kWarpLanes;
  const int32_t lane = threadIdx.x % kWarpLanes;
  const AppendRow row = rows[blockIdx.y];
  const int32_t tile_first = row.pos / kTileTokens;
  const int32_t tiles_touched = (row.pos + row.n - 1) / kTileTokens - tile_first + 1;
  const int32_t tasks = tiles_touched * row.kv_heads;
  for (int32_t task = blockIdx.x * kWarps + warp; task < tasks; task += gridDim.x * kWarps) {
    const int32_t kv_head = task % row.kv_heads;
    const int32_t tile = tile_first + task / row.kv_heads;
    const int32_t pos = max(row.pos, tile * kTileTokens);
    const int32_t end = min(row.pos + row.n, (tile + 1) * kTileTokens);
    const int64_t element =
        (static_cast<int64_t>(pos - row.pos) * row.kv_heads + kv_head) * kHeadDim;
    const TileRows tile_rows = {row.k + element, row.v + element,
                                static_cast<int64_t>(row.kv_heads) * kHeadDim, pos % kTileTokens,
                                pos % kTileTokens + (end - pos)};
    const int64_t page = row.block_table[tile / kTilesPerPage];
    uint8_t* to = row.base + page * row.page_stride +
                  static_cast<int64_t>(kv_head) * BlockBytesOf(kPrecision, kHeadDim) +
                  static_cast<int64_t>(tile % kTilesPerPage) * kTileBytes;
    if (end - pos < kTileTokens) {
      FillTile<kPrecision, kHeadDim>(tile_rows, lane, {to, false});
      continue;
    }
    FillTile<kPrecision, kHeadDim>(tile_rows, lane, {tiles[warp], true});
    __syncwarp();
    for (int32_t i = lane * 16; i < kTileBytes; i += kWarpLanes * 16) {
      *reinterpret_cast<uint4*>(to + i) =
          *reinterpret_cast<const uint4*>(tiles[warp] + Staggered(i));
    }
    __syncwarp();
  }
  WaitForPreviousLaunch();  // also where there was nothing to do: the next launch counts on it
}

template <Precision kPrecision, int32_t kHeadDim>
cudaError_t Launch(const AppendParams& params, int32_t tiles_max, bool tables_settled,
                   cudaStream_t stream) {
  // A warp's work is short; several tiles each keep the grid of a bulk append in a few waves.
  constexpr int32_t kBlocksMax = 2048;
  constexpr int32_t kWarps = WarpsFor(TileBytes(kPrecision, kHeadDim));
  const int32_t blocks = (tiles_max + kWarps - 1) / kWarps;
  const dim3 grid(blocks < kBlocksMax ? blocks : kBlocksMax, params.rows_count);
  return LaunchAfterPrevious(AppendKernel<kPrecision, kHeadDim>, grid, dim3(kWarps * kWarpLanes), 0,
                             stream, params.rows, tables_settled);
}

template <Precision kPrecision>
cudaError_t LaunchDim(const AppendParams& params, int32_t tiles_max, bool tables_settled,
                      cudaStream_t stream) {
  switch (params.head_dim) {
    case 64:
      return Launch<kPrecision, 64>(params, tiles_max, tables_settled, stream);
    case 80:
      return Launch<kPrecision, 80>(params, tiles_max, tables_settled, stream);
    case 96:
      return Launch<kPrecision, 96>(params, tiles_max, tables_settled, stream);
    case 128:
      return Launch<kPrecision, 128>(params, tiles_max, tables_settled, stream);
    case 192:
      return Launch<kPrecision, 192>(params, tiles_max, tables_settled, stream);
    case 256:
      return Launch<kPrecision, 256>(params, tiles_max, tables_settled, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t LaunchAppend(const AppendParams& params, int32_t tiles_max, bool tables_settled,
                         cudaStream_t stream) {
  return params.precision == Precision::kFp8Kv
             ? LaunchDim<Precision::kFp8Kv>(params, tiles_max, tables_settled, stream)
             : LaunchDim<Precision::kBf16>(params, tiles_max, tables_settled, stream);
}

}  // namespace fp8kvd::kernels::cuda
