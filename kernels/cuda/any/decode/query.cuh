// kernels/cuda/any/decode/query.cuh: a pair's query columns as registers, and its terms.
#pragma once

#include <cstdint>

#include "kernels/cuda/any/decode/output.cuh"
#include "kernels/cuda/any/decode/tile.cuh"
#include "kernels/cuda/any/decode/work.cuh"

namespace fp8kvd::kernels::cuda {

// Two bf16 times 2^kExponentTrick, exact: the host refuses what would overflow.
__device__ __forceinline__ uint32_t ScaleUp(uint32_t pair) {
  const __nv_bfloat162 factor = __float2bfloat162_rn(PowerOfTwo(kExponentTrick));
  const __nv_bfloat162 scaled = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair), factor);
  return *reinterpret_cast<const uint32_t*>(&scaled);
}

// Where a pair's query waits in shared memory, until its turn comes or for good
// (T::kQueryInShared): of each N tile and chunk 16 bytes a lane. Lanes touch their own alone, so
// nothing has to be awaited but a lane's own copies.
template <class T>
class QueryStage {
 public:
  __device__ __forceinline__ explicit QueryStage(uint8_t* shared) : shared_(shared) {}
  __device__ __forceinline__ uint4* shared() const { return reinterpret_cast<uint4*>(shared_); }

  // Sets out the copies. Lane (g, t) takes, of column g of each N tile, the dimensions that
  // page_layout.h gives to t of K. Columns beyond the pair's are 0.
  __device__ __forceinline__ void Fetch(const DecodeArgs& args, const DecodeRow& row,
                                        const Pair& pair, int32_t lane) const {
#pragma unroll
    for (int32_t n = 0; n < T::kNTiles; ++n) {
      const int32_t column = 8 * n + lane / 4;
      const int64_t element = PlaceOf(row, pair, args, column).index * T::kHeadDim;
      const uint16_t* from = row.q + element;
      const bool there = column < pair.columns;
#pragma unroll
      for (int32_t c = 0; c < kChunks; ++c) {
        uint4* to = At(n, c, lane);
        *to = uint4{};
        if (!there) continue;
        if (c < T::kChunks) {
          CopyAsync<16>(to, from + c * kChunkDims + 8 * (lane % 4));
        } else {
          CopyAsync<8>(to, from + c * kChunkDims + 4 * (lane % 4));
        }
      }
    }
  }

  // Waits for what Fetch set out.
  __device__ __forceinline__ void Take(int32_t lane, Query<T>& q) const {
    WaitForCopies();
#pragma unroll
    for (int32_t n = 0; n < T::kNTiles; ++n) {
#pragma unroll
      for (int32_t c = 0; c < kChunks; ++c) {
        uint4 x = *At(n, c, lane);
        if constexpr (T::kFp8) x = {ScaleUp(x.x), ScaleUp(x.y), ScaleUp(x.z), ScaleUp(x.w)};
        q.Set(n, c, x);
      }
    }
  }

 private:
  static constexpr int32_t kChunks = (T::kDimTiles + 1) / 2;

  __device__ __forceinline__ uint4* At(int32_t n, int32_t c, int32_t lane) const {
    return reinterpret_cast<uint4*>(shared_) + (n * kChunks + c) * kWarpLanes + lane;
  }

  uint8_t* shared_;
};

template <class T>
__device__ __forceinline__ ScoreTerms TermsOf(const DecodeRow& row) {
  ScoreTerms terms;
  terms.factor = row.sm_scale * kLog2E;
  if constexpr (T::kFp8) terms.factor *= PowerOfTwo(kCodeExponent - kExponentTrick);
  terms.cap = row.softcap * kLog2E;
  terms.two_over_cap = row.softcap != 0.0F ? 2.0F / row.softcap : 0.0F;
  return terms;
}

// A unit, whose first token is `token`. is_edge: see AttendTiles.
template <class T>
__device__ __forceinline__ void AttendUnit(uint8_t* unit, int32_t token, bool is_edge, int32_t lane,
                                           const Query<T>& q, const ScoreTerms& terms,
                                           const Visibility& seen, Accumulator<T>& acc) {
#pragma unroll 1
  for (int32_t m = 0; m < T::kUnitTiles; m += T::kTilesAtOnce) {
    AttendTiles<T, T::kTilesAtOnce>(unit + m * T::kTileBytes, token + m * kTileTokens, is_edge,
                                    lane, q, terms, seen, acc);
  }
}

}  // namespace fp8kvd::kernels::cuda
