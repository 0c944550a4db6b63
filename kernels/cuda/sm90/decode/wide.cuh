// kernels/cuda/sm90/decode/wide.cuh: a pair of 32 query columns attended by a warpgroup, in
// fp8_kv. Of a unit, which is a page, each warp takes the scores of its own tile's tokens with all
// columns, and then its own quarter of the output's dimensions over all tokens; weights go through
// shared memory between the two. So four warps hold one output, and a multiprocessor has room for
// three times as many; products are a warpgroup's, which read query and weights from shared memory
// once for all four.
//
// What the warps have to agree on are the origins that weights are counted from, and v_up. They do
// by the barrier behind the weights: where one is too large, as few are, all place the origins and
// begin the weights anew. That barrier also says that all are done with the unit before.
#pragma once

#include <cstdint>

#include "kernels/cuda/any/decode/query.cuh"
#include "kernels/cuda/sm90/decode/warpgroup.cuh"

namespace fp8kvd::kernels::cuda {

// What the warps of a warpgroup tell each other, behind the query.
template <class T>
struct WideShared {
  uint8_t weights[2][kTilesPerPage * OperandB::kBytes];  // of a unit, and of the next
  float of_columns[kWarpgroupWarps][T::kColumns];        // maxima, or shares of denominators
  float v_up[kWarpgroupWarps];
  float q_down[kWarpgroupWarps];  // Query::down of 8 columns each
};

// As an accumulator, a warp holds a quarter of the dimensions: one chunk, of its number.
template <class T>
struct QuarterTraits {
  static constexpr bool kFp8 = true;
  static constexpr bool kColumnsAreM = false;
  static constexpr int32_t kNTiles = T::kNTiles;
  static constexpr int32_t kDimTiles = T::kDimTiles / kWarpgroupWarps;
  static_assert(T::kChunks == kWarpgroupWarps && !T::kHalfChunk);
};
template <class T>
struct WideSums : Accumulator<QuarterTraits<T>> {
  __device__ __forceinline__ static bool SpeaksForColumns(int32_t lane) {
    return WarpOfWarpgroup() == 0 && lane / 4 == 0;
  }
};

template <class T, class Visit>
__device__ __forceinline__ void ForDims(const WideSums<T>& acc, int32_t n, int32_t i, int32_t lane,
                                        const Visit& visit) {
  VisitDims<4, false>(
      WarpOfWarpgroup() * kChunkDims + lane / 4 * 4,
      [&](int32_t j) -> auto& { return acc.o[n][j / 2][2 * (j % 2) + i]; }, visit);
}

// Of a warp's tile, tokens g and g + 8: scores are s times the token's factor.
template <class T>
struct WideScores {
  float s[T::kNTiles][4];
  float factor[2];
  float v_scale[2];
};

template <class T>
class WideAttends {
 public:
  __device__ __forceinline__ explicit WideAttends(uint4* query)
      : query_(reinterpret_cast<uint8_t*>(query)),
        shared_(*reinterpret_cast<WideShared<T>*>(query_ + T::kQueryBytes)),
        query_operand_(query_),
        warp_(WarpOfWarpgroup()),
        lane_(threadIdx.x % kWarpLanes) {
    static_assert(sizeof(WideShared<T>) <= T::kScratchBytes);
  }

  // Each warp brings 8 of the pair's columns to where products want them.
  __device__ __forceinline__ void TakeQuery(const DecodeArgs& args, const DecodeRow& row,
                                            const Pair& pair) {
    using Q = DecodeTraits<T::kPrecision, T::kHeadDim, 8>;
    Pair mine = pair;
    mine.column_first += 8 * warp_;
    mine.columns -= 8 * warp_;
    Query<Q> q(nullptr);
    QueryPlace<Q>(args, row, mine, lane_).Load(lane_, q);
    MakeOperand<Q>(q);
#pragma unroll
    for (int32_t c = 0; c < T::kChunks; ++c) {
      const uint4 x = q.Get(0, c);
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
      uint8_t* to = query_ + 2 * c * OperandB::kBytes + warp_ * OperandB::kMatrixBytes;
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        reinterpret_cast<uint32_t*>(to + i * OperandB::kRowsBytes)[lane_] = words[i];
      }
    }
    if (lane_ == 0) shared_.q_down[warp_] = q.down;
    OrderStoresBeforeProducts();
    is_scaled_ = SyncWarpgroupOr(q.down != 1.0F);
  }

  // All of the stretch, to the sums that Leave takes.
  template <class Ring, class Pipeline>
  __device__ __forceinline__ WideSums<T> Attend(Pipeline& pipeline, const Attention<T>& attention,
                                                Stretch stretch, int32_t let_next_at) {
    WideSums<T> acc;
    acc.Clear();
    const auto release = [&] {
      pipeline.Release();
      if (pipeline.Left() <= let_next_at) LetNextLaunchStart();
    };
    uint8_t* unit = pipeline.Wait();
    for (int32_t i = 1;; ++i) {
      WideScores<T> scores;
      Multiply(unit, scores.s);
      Score(unit, stretch.token, attention, scores);
      uint8_t* weights = shared_.weights[i % 2];
      float sums[T::kNTiles][2];
      StoreWeights<false>(scores, acc, weights, sums);
      const bool moves = SyncWarpgroupOr(AreTooLarge(sums, scores.v_scale, acc));
      if (i > 1 && pipeline.HoldsTwo()) release();  // all are done with the unit before
      if (moves) {
        PlaceOrigins(scores, acc);
        StoreWeights<true>(scores, acc, weights, sums);
        SyncWarpgroup();
      }
#pragma unroll
      for (int32_t n = 0; n < T::kNTiles; ++n) {
        acc.sum[n][0] += sums[n][0];
        acc.sum[n][1] += sums[n][1];
      }
      Accumulate(unit, weights, acc);
      if (i == stretch.units) break;
      stretch.token += stretch.stride;
      if (pipeline.HoldsTwo()) {
        unit = pipeline.WaitForNext();
      } else {
        SyncWarpgroup();
        release();
        unit = pipeline.Wait();
      }
    }
    AddUpSums(acc);
    release();
    return acc;
  }

 private:
  using Quarter = QuarterTraits<T>;
  // From where above its origin a score moves it, when any has to. Two such come to no more than
  // AreTooLarge allows.
  static constexpr int32_t kNearMax = kScoreMax - 1;

  __device__ __forceinline__ const uint8_t* MyTile(const uint8_t* unit) const {
    return unit + warp_ * T::kTileBytes;
  }

  // Products of the warp's tile with the query.
  __device__ __forceinline__ void Multiply(const uint8_t* unit, float (&s)[T::kNTiles][4]) const {
    KeyChunk<T> keys[T::kChunks];
#pragma unroll
    for (int32_t c = 0; c < T::kChunks; ++c) keys[c].Load(MyTile(unit), c, lane_);
    WarpgroupProducts::Begin();
#pragma unroll
    for (int32_t k = 0; k < 2 * T::kChunks; ++k) {
      WarpgroupProducts::Multiply(s[0], s[1], s[2], s[3], keys[k / 2].a + k % 2 * 4,
                                  query_operand_.Next(k), k > 0);
    }
    WarpgroupProducts::End();
#pragma unroll
    for (int32_t n = 0; n < T::kNTiles; ++n) WarpgroupProducts::Receive(s[n]);
  }

  // From products to scores. token: the unit's first.
  __device__ __forceinline__ void Score(uint8_t* unit, int32_t token, const Attention<T>& attention,
                                        WideScores<T>& scores) const {
    ScoreFactors<T>(MyTile(unit), lane_, attention.terms, scores.factor);
    LoadVScales<T>(MyTile(unit), lane_, scores.v_scale);
    const bool is_edge = attention.IsEdge(token);
    if (!is_edge && !is_scaled_ && attention.terms.cap == 0.0F) return;
#pragma unroll
    for (int32_t n = 0; n < T::kNTiles; ++n) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        scores.s[n][i] *= scores.factor[i / 2] * shared_.q_down[n];
      }
    }
    scores.factor[0] = scores.factor[1] = 1.0F;
    if (attention.terms.cap != 0.0F) CapScores<T>(attention.terms, scores.s);
    if (is_edge) Mask(unit, token + warp_ * kTileTokens, attention, scores);
  }

  // token: the tile's first.
  __device__ __forceinline__ void Mask(uint8_t* unit, int32_t token, const Attention<T>& attention,
                                       WideScores<T>& scores) const {
    const Visibility seen =
        VisibilityOf(attention.row, attention.group_inverse, attention.column_first);
    MaskScores<T>(token, lane_, seen, scores.s);
    const int2 of_tile = SeenOfTile(token, seen);
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const int32_t at = lane_ / 4 + 8 * i;
      if (at < of_tile.x || at >= of_tile.y) scores.v_scale[i] = 0.0F;
    }
    ClearUnseenV<T>(unit + warp_ * T::kTileBytes + T::kVOffset, lane_, of_tile);
  }

  // The tile's weights times v_scale, and this lane's shares of the denominators. kPlaced: origins
  // are where these scores need them, and one is a score rounded, so the others are, too: the fma
  // would count what rounding took, much at the edge of the range, as far above or below it.
  template <bool kPlaced>
  __device__ __forceinline__ void StoreWeights(const WideScores<T>& scores, const WideSums<T>& acc,
                                               uint8_t* weights,
                                               float (&sums)[T::kNTiles][2]) const {
    const float up[2] = {scores.v_scale[0] * acc.v_up, scores.v_scale[1] * acc.v_up};
    uint32_t first[T::kNTiles];  // of tokens 0 to 7
    uint32_t last[T::kNTiles];
#pragma unroll
    for (int32_t n = 0; n < T::kNTiles; ++n) {
      float w[4];
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        const float factor = scores.factor[i / 2];
        const float origin = acc.origin[n][i % 2];
        w[i] = Exp2(kPlaced ? __fsub_rn(__fmul_rn(scores.s[n][i], factor), origin)
                            : fmaf(scores.s[n][i], factor, -origin));
      }
      sums[n][0] = w[0] + w[2];
      sums[n][1] = w[1] + w[3];
      first[n] = PackF16(w[0] * up[0], w[1] * up[0]);
      last[n] = PackF16(w[2] * up[1], w[3] * up[1]);
    }
    uint8_t* to = weights + warp_ * OperandB::kBytes;
    StoreTransposed(to, lane_, first);
    StoreTransposed(to + OperandB::kRowsBytes, lane_, last);
    OrderStoresBeforeProducts();
  }

  // Two weights come to more than one may be (PlaceOrigins, scores.cuh), or v_scale is beyond what
  // it may be.
  __device__ __forceinline__ static bool AreTooLarge(const float (&sums)[T::kNTiles][2],
                                                     const float (&v_scale)[2],
                                                     const WideSums<T>& acc) {
    float most = 0.0F;
#pragma unroll
    for (int32_t n = 0; n < T::kNTiles; ++n) most = fmaxf(most, fmaxf(sums[n][0], sums[n][1]));
    const bool overflow = fmaxf(v_scale[0], v_scale[1]) * acc.v_up > PowerOfTwo(kVExponentMax);
    return (most > PowerOfTwo(kScoreMax)) | overflow;
  }

  // Moves origins up to where the unit's scores need them, and v_up. All warps call it.
  __device__ __forceinline__ void PlaceOrigins(const WideScores<T>& scores, WideSums<T>& acc) {
    float2* mine = reinterpret_cast<float2*>(shared_.of_columns[warp_]);
#pragma unroll
    for (int32_t n = 0; n < T::kNTiles; ++n) {
      float max[2];
#pragma unroll
      for (int32_t i = 0; i < 2; ++i) {
        max[i] = fmaxf(scores.s[n][i] * scores.factor[0], scores.s[n][2 + i] * scores.factor[1]);
      }
      MaximaOfLanes(max);
      if (lane_ < 4) mine[4 * n + lane_] = {max[0], max[1]};
    }
    const float up_for_mine = VUpFor(fmaxf(scores.v_scale[0], scores.v_scale[1]));
    if (lane_ == 0) shared_.v_up[warp_] = up_for_mine;
    SyncWarpgroup();
    const float4 ups = *reinterpret_cast<const float4*>(shared_.v_up);
    const float up = fminf(fminf(ups.x, ups.y), fminf(ups.z, ups.w));
    const float o_factor = MoveVUp(up, acc);
#pragma unroll
    for (int32_t n = 0; n < T::kNTiles; ++n) {
      float to[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int32_t w = 0; w < kWarpgroupWarps; ++w) {
        const float2 max =
            reinterpret_cast<const float2*>(shared_.of_columns[w])[4 * n + lane_ % 4];
        to[0] = fmaxf(to[0], max.x);
        to[1] = fmaxf(to[1], max.y);
      }
#pragma unroll
      for (int32_t i = 0; i < 2; ++i) {
        to[i] = to[i] > acc.origin[n][i] + kNearMax ? to[i] : -INFINITY;
      }
      MoveOrigins<Quarter>(to, o_factor, n, acc);
    }
  }

  // o += V P, for the warp's dimensions.
  __device__ __forceinline__ void Accumulate(const uint8_t* unit, const uint8_t* weights,
                                             WideSums<T>& acc) const {
    constexpr int32_t kDimTiles = Quarter::kDimTiles;
    uint32_t a[kTilesPerPage][4 * kDimTiles];
#pragma unroll
    for (int32_t m = 0; m < kTilesPerPage; ++m) LoadV(unit + m * T::kTileBytes + T::kVOffset, a[m]);
    const OperandB p(weights);
    WarpgroupProducts::Begin();
#pragma unroll
    for (int32_t m = 0; m < kTilesPerPage; ++m) {
#pragma unroll
      for (int32_t d = 0; d < kDimTiles; ++d) {
        WarpgroupProducts::Multiply(acc.o[0][d], acc.o[1][d], acc.o[2][d], acc.o[3][d],
                                    a[m] + 4 * d, p.Next(m), true);
      }
    }
    WarpgroupProducts::End();
#pragma unroll
    for (int32_t n = 0; n < T::kNTiles; ++n) {
#pragma unroll
      for (int32_t d = 0; d < kDimTiles; ++d) WarpgroupProducts::Receive(acc.o[n][d]);
    }
  }

  // The warp's chunk of a tile's V, two M tiles.
  __device__ __forceinline__ void LoadV(const uint8_t* v, uint32_t (&a)[8]) const {
    const uint8_t* chunk = v + warp_ * kChunkDims * kTileTokens;
    ExpandChunk(reinterpret_cast<const uint4*>(chunk)[lane_], a);
  }

  // The denominators over all lanes and warps. A barrier: all are done with the pair's last unit.
  __device__ __forceinline__ void AddUpSums(WideSums<T>& acc) {
    Close<Quarter>(acc);
    float2* mine = reinterpret_cast<float2*>(shared_.of_columns[warp_]);
#pragma unroll
    for (int32_t n = 0; n < T::kNTiles; ++n) {
      if (lane_ < 4) mine[4 * n + lane_] = {acc.sum[n][0], acc.sum[n][1]};
    }
    SyncWarpgroup();
#pragma unroll
    for (int32_t n = 0; n < T::kNTiles; ++n) {
      acc.sum[n][0] = acc.sum[n][1] = 0.0F;
#pragma unroll
      for (int32_t w = 0; w < kWarpgroupWarps; ++w) {
        const float2 sum =
            reinterpret_cast<const float2*>(shared_.of_columns[w])[4 * n + lane_ % 4];
        acc.sum[n][0] += sum.x;
        acc.sum[n][1] += sum.y;
      }
    }
  }

  uint8_t* const query_;  // [k-steps] OperandB
  WideShared<T>& shared_;
  const OperandB query_operand_;
  const int32_t warp_;
  const int32_t lane_;
  bool is_scaled_ = false;  // some Query::down is not 1
};

}  // namespace fp8kvd::kernels::cuda
