// kernels/cuda/any/decode/query.cuh: a pair's query columns as registers, and its terms.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/any/decode/many_columns.cuh"
#include "kernels/cuda/any/decode/output.cuh"
#include "kernels/cuda/any/decode/tile.cuh"
#include "kernels/cuda/any/decode/work.cuh"

namespace fp8kvd::kernels::cuda {

// A query's bf16 on their way to f16, in fp8_kv. Where each lane's largest value is 2^-6 to 2^15,
// or 0, as nearly always, they stay as they are, but for 2^-25; others are scaled by powers of two
// first, so that the largest is 2^15 to 2^16, and Query::down says by which.
template <class T>
class QueryInF16 {
 public:
  static constexpr int32_t kChunks = (T::kDimTiles + 1) / 2;

  // q: as bf16.
  __device__ __forceinline__ explicit QueryInF16(const Query<T>& q) {
    uint4 largest{};
#pragma unroll
    for (int32_t n = 0; n < T::kNTiles; ++n) {
#pragma unroll
      for (int32_t c = 0; c < kChunks; ++c) {
        x_[n][c] = q.Get(n, c);
        largest = {MaxOfMagnitudes(largest.x, x_[n][c].x), MaxOfMagnitudes(largest.y, x_[n][c].y),
                   MaxOfMagnitudes(largest.z, x_[n][c].z), MaxOfMagnitudes(largest.w, x_[n][c].w)};
      }
    }
    const uint32_t pair =
        MaxOfPairs(MaxOfPairs(largest.x, largest.y), MaxOfPairs(largest.z, largest.w));
    largest_ = max(pair & 0xFFFFU, pair >> 16);
  }

  // Whether no lane's part has to be scaled. All lanes call it.
  __device__ __forceinline__ bool Fits() const {
    constexpr uint32_t kFrom = (kBias - 6) << 7;
    constexpr uint32_t kTo = (kBias + kLargest) << 7;
    return !__any_sync(kAllLanes, largest_ != 0U && largest_ - kFrom >= kTo - kFrom);
  }

  // Scales, and returns what takes that back.
  __device__ __forceinline__ float Scale() {
    const uint32_t largest = __reduce_max_sync(kAllLanes, largest_);
    const int32_t exponent = max(static_cast<int32_t>(largest >> 7) - kBias, kLargest - kBias + 1);
    const __nv_bfloat162 up = __float2bfloat162_rn(PowerOfTwo(kLargest - exponent));
#pragma unroll
    for (int32_t n = 0; n < T::kNTiles; ++n) {
#pragma unroll
      for (int32_t c = 0; c < kChunks; ++c) {
        uint4& y = x_[n][c];
        y = {Times(y.x, up), Times(y.y, up), Times(y.z, up), Times(y.w, up)};
      }
    }
    return PowerOfTwo(exponent - kLargest);
  }

  // Leaves them in q, as f16. Where columns are M, what two N tiles have of a chunk becomes mma's A
  // of one M tile for the chunk's first k-step, and for its second.
  __device__ __forceinline__ void Store(Query<T>& q) const {
#pragma unroll
    for (int32_t c = 0; c < kChunks; ++c) {
      if constexpr (T::kColumnsAreM) {
#pragma unroll
        for (int32_t n = 0; n < T::kNTiles; n += 2) {
          const uint4 y = x_[n][c];
          const uint4 z = x_[n + 1][c];
          q.Set(n, c, {ToF16(y.x), ToF16(z.x), ToF16(y.y), ToF16(z.y)});
          q.Set(n + 1, c, {ToF16(y.z), ToF16(z.z), ToF16(y.w), ToF16(z.w)});
        }
      } else {
#pragma unroll
        for (int32_t n = 0; n < T::kNTiles; ++n) {
          const uint4 y = x_[n][c];
          q.Set(n, c, {ToF16(y.x), ToF16(y.y), ToF16(y.z), ToF16(y.w)});
        }
      }
    }
  }

 private:
  static constexpr int32_t kBias = 127;
  static constexpr int32_t kLargest = 15;

  __device__ __forceinline__ static uint32_t Times(uint32_t pair, __nv_bfloat162 factor) {
    const __nv_bfloat162 scaled = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair), factor);
    return *reinterpret_cast<const uint32_t*>(&scaled);
  }
  __device__ __forceinline__ static uint32_t ToF16(uint32_t pair) {
    return PackF16(LowValue(pair), HighValue(pair));
  }

  uint4 x_[T::kNTiles][kChunks];
  uint32_t largest_;  // this lane's largest magnitude, as bf16
};

// Makes a query of bf16 what the cache's elements are multiplied with.
template <class T>
__device__ __forceinline__ void MakeOperand(Query<T>& q) {
  if constexpr (T::kFp8) {
    QueryInF16<T> f16(q);
    if (!f16.Fits()) q.down = f16.Scale();
    f16.Store(q);
  }
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
    if constexpr (!T::kQueryInShared) {  // else q is what was copied
#pragma unroll
      for (int32_t n = 0; n < T::kNTiles; ++n) {
#pragma unroll
        for (int32_t c = 0; c < kChunks; ++c) q.Set(n, c, *At(n, c, lane));
      }
    }
    MakeOperand<T>(q);
  }

 private:
  static constexpr int32_t kChunks = (T::kDimTiles + 1) / 2;

  __device__ __forceinline__ uint4* At(int32_t n, int32_t c, int32_t lane) const {
    return reinterpret_cast<uint4*>(shared_) + (n * kChunks + c) * kWarpLanes + lane;
  }

  uint8_t* shared_;
};

// Where a lane's part of a pair's query lies: found out before the query may be read, so that one
// load is all that comes after. For queries that fit registers.
template <class T>
class QueryPlace {
 public:
  __device__ __forceinline__ QueryPlace(const DecodeArgs& args, const DecodeRow& row,
                                        const Pair& pair, int32_t lane) {
#pragma unroll
    for (int32_t n = 0; n < T::kNTiles; ++n) {
      const int32_t column = 8 * n + lane / 4;
      const int64_t element = PlaceOf(row, pair, args, column).index * T::kHeadDim;
      from_[n] = column < pair.columns ? row.q + element : nullptr;
    }
  }

  // Without MakeOperand, which waits for what is loaded here.
  __device__ __forceinline__ void Load(int32_t lane, Query<T>& q) const {
#pragma unroll
    for (int32_t n = 0; n < T::kNTiles; ++n) {
#pragma unroll
      for (int32_t c = 0; c < (T::kDimTiles + 1) / 2; ++c) {
        uint4 x{};
        if (from_[n] != nullptr) {
          const uint16_t* chunk = from_[n] + c * kChunkDims;
          if (c < T::kChunks) {
            x = __ldcg(reinterpret_cast<const uint4*>(chunk + 8 * (lane % 4)));
          } else {
            const uint2 half = __ldcg(reinterpret_cast<const uint2*>(chunk + 4 * (lane % 4)));
            x = {half.x, half.y, 0U, 0U};
          }
        }
        q.Set(n, c, x);
      }
    }
  }

 private:
  const uint16_t* from_[T::kNTiles];
};

template <class T>
__device__ __forceinline__ ScoreTerms TermsOf(const DecodeRow& row) {
  ScoreTerms terms;
  terms.factor = row.sm_scale * kLog2E;
  terms.cap = row.softcap * kLog2E;
  terms.two_over_cap = row.softcap != 0.0F ? 2.0F / row.softcap : 0.0F;
  return terms;
}

template <class T>
using TilesOf = std::conditional_t<T::kColumnsAreM, ManyColumnTiles<T>, Tiles<T>>;

// What a warp needs of a pair to attend its units.
template <class T>
struct Attention {
  const DecodeRow& row;
  int32_t group_inverse;
  int32_t column_first;
  ScoreTerms terms = TermsOf<T>(row);
  const int2 seen_by_all = SeenByAll(row);

  // Before scores are counted.
  __device__ __forceinline__ void CountQuery(const Query<T>& q) {
    if constexpr (T::kFp8) terms.factor *= q.down;
  }

  __device__ __forceinline__ bool IsEdge(int32_t token) const {
    return token < seen_by_all.x || token + T::kUnitTokens > seen_by_all.y;
  }
  template <bool kFirst = false>
  __device__ __forceinline__ void Score(TilesOf<T>& tiles, int32_t token, bool is_edge,
                                        int32_t lane, Accumulator<T>& acc) const {
    tiles.template Score<kFirst>(
        token, is_edge, lane, terms, [&] { return VisibilityOf(row, group_inverse, column_first); },
        acc);
  }
};

// Units of a pair: the first one's first token, how far each later one's is further on (tokens),
// and how many there are, at least one.
struct Stretch {
  int32_t token;
  int32_t stride;
  int32_t units;
};

// The pipeline's next units, all of one pair, one step of T::kTilesAtOnce tiles after the other.
// let_next_at: lets the next launch start when no more than so many of the pipeline's units are
// still to be set out; -1: does not.
template <class T, class Ring, class Pipeline>
__device__ __forceinline__ void AttendOneByOne(Pipeline& pipeline, const Attention<T>& attention,
                                               Stretch stretch, int32_t lane, const Query<T>& q,
                                               Accumulator<T>& acc, int32_t let_next_at) {
  TilesOf<T> tiles;
  int32_t token = stretch.token;
  for (int32_t i = 0; i < stretch.units; ++i, token += stretch.stride) {
    uint8_t* unit = pipeline.Wait();
    const bool is_edge = attention.IsEdge(token);
#pragma unroll 1
    for (int32_t m = 0; m < T::kUnitTiles; m += T::kTilesAtOnce) {
      tiles.Begin(unit + m * T::kTileBytes, lane, q);
      attention.Score(tiles, token + m * kTileTokens, is_edge, lane, acc);
      tiles.End(lane, acc);
    }
    if (is_edge && pipeline.Left() > 0) Ring::OrderStoresBeforeCopies();  // ClearUnseenV stored
    pipeline.Release();
    if (pipeline.Left() <= let_next_at) LetNextLaunchStart();
  }
}

// The same where a step is a unit, and keys of the first one, which is here, are ready. acc is as
// Clear left it. fits() says whether q may be used as it is; it is asked while the first products
// are on their way. Where q may not, scale() mends it and `attention`, and they are taken again.
template <class T, class Ring, class Pipeline, class Fits, class Scale>
__device__ __forceinline__ void AttendFrom(const FirstKeys<T>& keys, uint8_t* unit,
                                           Pipeline& pipeline, const Attention<T>& attention,
                                           Stretch stretch, int32_t lane, const Query<T>& q,
                                           Accumulator<T>& acc, int32_t let_next_at,
                                           const Fits& fits, const Scale& scale) {
  static_assert(T::kFp8 && T::kUnitTiles == T::kTilesAtOnce);
  TilesOf<T> tiles;
  int32_t token = stretch.token;
  bool is_edge = attention.IsEdge(token);
#pragma unroll 1
  for (bool scaled = false;; scaled = true) {
    tiles.Begin(unit, keys, lane, q);
    if (scaled || fits()) break;
    scale();
  }
  attention.template Score<true>(tiles, token, is_edge, lane, acc);
  tiles.End(lane, acc);
  for (int32_t i = 1;; ++i) {
    if (is_edge && pipeline.Left() > 0) Ring::OrderStoresBeforeCopies();
    pipeline.Release();
    if (pipeline.Left() <= let_next_at) LetNextLaunchStart();
    if (i == stretch.units) return;
    token += stretch.stride;
    is_edge = attention.IsEdge(token);
    tiles.Begin(pipeline.Wait(), lane, q);
    attention.Score(tiles, token, is_edge, lane, acc);
    tiles.End(lane, acc);
  }
}

// The same with two steps in work at a time, where the ring holds two units.
template <class T, class Ring, class Pipeline>
__device__ __forceinline__ void AttendInTurns(Pipeline& pipeline, const Attention<T>& attention,
                                              Stretch stretch, int32_t lane, const Query<T>& q,
                                              Accumulator<T>& acc, int32_t let_next_at) {
  TilesOf<T> tiles;
  int32_t token = stretch.token;
  uint8_t* unit = pipeline.Wait();
  tiles.Begin(unit, lane, q);
  for (int32_t i = 1;; ++i, token += stretch.stride) {
    const bool is_edge = attention.IsEdge(token);
    attention.Score(tiles, token, is_edge, lane, acc);
#pragma unroll 1
    for (int32_t m = T::kTilesAtOnce; m < T::kUnitTiles; m += T::kTilesAtOnce) {
      tiles.Turn(unit + m * T::kTileBytes, lane, q, acc);
      attention.Score(tiles, token + m * kTileTokens, is_edge, lane, acc);
    }
    const bool is_last = i == stretch.units;
    const bool turns = !is_last && pipeline.HoldsTwo();
    if (turns) {
      unit = pipeline.WaitForNext();
      tiles.Turn(unit, lane, q, acc);
    } else {
      tiles.End(lane, acc);
    }
    if (is_edge && pipeline.Left() > 0) Ring::OrderStoresBeforeCopies();
    pipeline.Release();
    if (pipeline.Left() <= let_next_at) LetNextLaunchStart();
    if (is_last) return;
    if (!turns) {
      unit = pipeline.Wait();
      tiles.Begin(unit, lane, q);
    }
  }
}

template <class T, class Ring, class Pipeline>
__device__ __forceinline__ void AttendUnits(Pipeline& pipeline, const Attention<T>& attention,
                                            Stretch stretch, int32_t lane, const Query<T>& q,
                                            Accumulator<T>& acc, int32_t let_next_at) {
  if constexpr (T::kTurns) {
    AttendInTurns<T, Ring>(pipeline, attention, stretch, lane, q, acc, let_next_at);
  } else {
    AttendOneByOne<T, Ring>(pipeline, attention, stretch, lane, q, acc, let_next_at);
  }
}

}  // namespace fp8kvd::kernels::cuda
