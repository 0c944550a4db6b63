// kernels/cuda/any/decode/output.cuh: from what a warp or several hold of a pair to its output:
// pieces, their merge, the sink, the division, the store.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/any/decode/registers.cuh"
#include "kernels/cuda/any/decode/work.cuh"

namespace fp8kvd::kernels::cuda {

// A query column's place in q and out (times head_dim) and in lse.
struct ColumnPlace {
  int64_t index;
  int32_t q_head;
};

__device__ __forceinline__ ColumnPlace PlaceOf(const DecodeRow& row, const Pair& pair,
                                               const DecodeArgs& args, int32_t column) {
  const int32_t of_kv_head = pair.column_first + column;
  const int32_t query = (of_kv_head * args.group_inverse) >> 16;
  const int32_t q_head = pair.kv_head * args.group + of_kv_head - query * args.group;
  return {query * row.kv_heads * args.group + q_head, q_head};
}

// What the raw sums are multiplied by, and the natural log of the denominator.
struct Finish {
  float factor;
  float lse;
};

__device__ __forceinline__ Finish FinishColumn(const DecodeRow& row, int32_t q_head, float origin,
                                               float sum) {
  float common = origin;
  float weight = 1.0F;
  float total = sum;
  float lse_min = -INFINITY;
  if (row.sink_logits != nullptr) {
    lse_min = row.sink_logits[q_head];
    const float sink = fminf(lse_min * kLog2E, kFloatMax);  // in log2 it may be beyond
    common = fmaxf(origin, sink);
    weight = Exp2(origin - common);
    total = sum * weight + Exp2(sink - common);
  }
  if (!(total > 0.0F)) return {total * 0.0F, total == total ? -INFINITY : total};
  return {__fdividef(weight, total), fmaxf((common + __log2f(total)) * kLn2, lse_min)};
}

template <int32_t kCount>
__device__ __forceinline__ void StoreOut(const DecodeRow& row, OutType type, int64_t element,
                                         const float (&x)[kCount]) {
  static_assert(kCount == 2 || kCount == 4);
  if (type == OutType::kBf16) {
    uint32_t* out = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(row.out) + element);
    if constexpr (kCount == 4) {
      *reinterpret_cast<uint2*>(out) = {PackBf16(x[0], x[1]), PackBf16(x[2], x[3])};
    } else {
      *out = PackBf16(x[0], x[1]);
    }
  } else {
    float* out = static_cast<float*>(row.out) + element;
    if constexpr (kCount == 4) {
      *reinterpret_cast<float4*>(out) = {x[0], x[1], x[2], x[3]};
    } else {
      *reinterpret_cast<float2*>(out) = {x[0], x[1]};
    }
  }
}

// Adds up the lanes' shares of the denominators, and takes back v_up.
template <class T>
__device__ __forceinline__ void Close(Accumulator<T>& acc) {
  const float v_down = acc.VDown();
#pragma unroll
  for (int32_t n = 0; n < acc.kColumnTiles; ++n) {
    if constexpr (T::kFp8) {
#pragma unroll
      for (auto& of_dim_tile : acc.o[n]) {
#pragma unroll
        for (float& x : of_dim_tile) x *= v_down;
      }
    }
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
#pragma unroll
      for (int32_t step = acc.kLanesStep; step < acc.kLanesEnd; step *= 2) {
        acc.sum[n][i] += __shfl_xor_sync(kAllLanes, acc.sum[n][i], step);
      }
    }
  }
}

// What one load or store moves.
template <int32_t kCount>
struct alignas(4 * kCount) Floats {
  float x[kCount];
};

// Calls visit(dim, values) for kCount neighbouring dimensions that a lane holds of one of its
// columns, at(j) the j-th of them, and keeps what visit makes of them where kKeeps.
template <int32_t kCount, bool kKeeps, class At, class Visit>
__device__ __forceinline__ void VisitDims(int32_t dim, const At& at, const Visit& visit) {
  float x[kCount];
#pragma unroll
  for (int32_t j = 0; j < kCount; ++j) x[j] = at(j);
  visit(dim, x);
  if constexpr (kKeeps) {
#pragma unroll
    for (int32_t j = 0; j < kCount; ++j) at(j) = x[j];
  }
}

// VisitDims for all that a lane holds of one of its columns (page_layout.h, V). Where columns are
// N: four dimensions of each chunk, two of half a chunk; where they are M twice as many. Acc: an
// Accumulator.
template <class Acc, class Visit>
__device__ __forceinline__ void ForDims(Acc& acc, int32_t n, int32_t i, int32_t lane,
                                        const Visit& visit) {
  using T = typename Acc::Traits;
  constexpr bool kKeeps = !std::is_const_v<Acc>;
  constexpr int32_t kHalf = T::kChunks * kChunkDims;
  if constexpr (T::kColumnsAreM) {
    const int32_t t = lane % 4;
#pragma unroll
    for (int32_t c = 0; c < T::kChunks; ++c) {
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        VisitDims<4, kKeeps>(
            c * kChunkDims + 8 * t + 4 * h,
            [&](int32_t j) -> auto& { return acc.o[n][4 * c + j][2 * i + h]; }, visit);
      }
    }
    if constexpr (T::kHalfChunk) {
      VisitDims<4, kKeeps>(
          kHalf + 4 * t,
          [&](int32_t j) -> auto& { return acc.o[n][4 * T::kChunks + j % 2][2 * i + j / 2]; },
          visit);
    }
  } else {
    const int32_t g = lane / 4;
#pragma unroll
    for (int32_t c = 0; c < T::kChunks; ++c) {
      VisitDims<4, kKeeps>(
          c * kChunkDims + 4 * g,
          [&](int32_t j) -> auto& { return acc.o[n][2 * c + j / 2][2 * (j % 2) + i]; }, visit);
    }
    if constexpr (T::kHalfChunk) {
      VisitDims<2, kKeeps>(
          kHalf + 2 * g, [&](int32_t j) -> auto& { return acc.o[n][T::kDimTiles - 1][2 * j + i]; },
          visit);
    }
  }
}

// A pair that one warp saw whole goes out from its registers. acc: after Close.
template <class T, class Sums>
__device__ __forceinline__ void WriteWhole(const DecodeArgs& args, const DecodeRow& row,
                                           const Pair& pair, int32_t lane, const Sums& acc) {
#pragma unroll
  for (int32_t n = 0; n < acc.kColumnTiles; ++n) {
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const int32_t column = acc.Column(n, i, lane);
      if (column >= pair.columns) continue;
      const ColumnPlace place = PlaceOf(row, pair, args, column);
      const Finish finish = FinishColumn(row, place.q_head, acc.origin[n][i], acc.sum[n][i]);
      ForDims(acc, n, i, lane, [&](int32_t dim, const auto& x) {
        constexpr int32_t kCount = sizeof(x) / sizeof(float);
        float y[kCount];
#pragma unroll
        for (int32_t j = 0; j < kCount; ++j) y[j] = x[j] * finish.factor;
        StoreOut(row, args.out_type, place.index * T::kHeadDim + dim, y);
      });
      if (acc.SpeaksForColumns(lane) && row.lse != nullptr) {
        row.lse[place.index] = finish.lse;
      }
    }
  }
}

// Leaves what a warp holds as a piece, in shared or global memory. acc: after Close.
template <class T, class Sums>
__device__ __forceinline__ void WritePiece(const Sums& acc, int32_t lane, float* piece) {
#pragma unroll
  for (int32_t n = 0; n < acc.kColumnTiles; ++n) {
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      float* column = piece + acc.Column(n, i, lane) * T::kPieceStride;
      ForDims(acc, n, i, lane, [&](int32_t dim, const auto& x) {
        constexpr int32_t kCount = sizeof(x) / sizeof(float);
        Floats<kCount> y;
#pragma unroll
        for (int32_t j = 0; j < kCount; ++j) y.x[j] = x[j];
        *reinterpret_cast<Floats<kCount>*>(column + dim) = y;
      });
      if (acc.SpeaksForColumns(lane)) {
        *reinterpret_cast<float2*>(column + T::kHeadDim) = {acc.origin[n][i], acc.sum[n][i]};
      }
    }
  }
}

// Adds to what a warp holds a piece that it left before, by the arithmetic of Merged with the piece
// first. acc: after Close.
template <class T>
__device__ __forceinline__ void FoldPiece(const float* piece, int32_t lane, Accumulator<T>& acc) {
#pragma unroll
  for (int32_t n = 0; n < acc.kColumnTiles; ++n) {
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const float* column = piece + acc.Column(n, i, lane) * T::kPieceStride;
      const float2 terms = *reinterpret_cast<const float2*>(column + T::kHeadDim);
      const float origin = fmaxf(terms.x, acc.origin[n][i]);
      const float weight = Exp2(acc.origin[n][i] - origin);
      const float of_piece = Exp2(terms.x - origin);
      acc.origin[n][i] = origin;
      acc.sum[n][i] = fmaf(weight, acc.sum[n][i], terms.y * of_piece);
      ForDims(acc, n, i, lane, [&](int32_t dim, auto& x) {
        constexpr int32_t kCount = sizeof(x) / sizeof(float);
        const auto y = *reinterpret_cast<const Floats<kCount>*>(column + dim);
#pragma unroll
        for (int32_t j = 0; j < kCount; ++j) x[j] = fmaf(weight, x[j], y.x[j] * of_piece);
      });
    }
  }
}

// Four dimensions of one column of several pieces, over their highest origin.
struct Merged {
  float4 o;
  float origin;
  float sum;

  // Counts what is there over an origin that is not lower.
  __device__ __forceinline__ void RaiseTo(float new_origin) {
    const float weight = Exp2(origin - new_origin);
    origin = new_origin;
    sum *= weight;
    o = {o.x * weight, o.y * weight, o.z * weight, o.w * weight};
  }

  // A piece's part: terms are its origin, not above ours, and its sum.
  __device__ __forceinline__ void Add(float2 terms, float4 piece) {
    const float weight = Exp2(terms.x - origin);
    sum = fmaf(weight, terms.y, sum);
    o.x = fmaf(weight, piece.x, o.x);
    o.y = fmaf(weight, piece.y, o.y);
    o.z = fmaf(weight, piece.z, o.z);
    o.w = fmaf(weight, piece.w, o.w);
  }
};

// Merges what load(i, terms, o) gives for i in [0, count). Loads of kPiecesAtOnce pieces are under
// way together, since each takes longer than all of the arithmetic.
inline constexpr int32_t kPiecesAtOnce = 4;

template <class Load>
__device__ __forceinline__ Merged MergeAll(int32_t count, const Load& load) {
  Merged merged{{0.0F, 0.0F, 0.0F, 0.0F}, kEmptyMax, 0.0F};
#pragma unroll 1
  for (int32_t first = 0; first < count; first += kPiecesAtOnce) {
    float2 terms[kPiecesAtOnce];
    float4 o[kPiecesAtOnce];
    float origin = merged.origin;
#pragma unroll
    for (int32_t i = 0; i < kPiecesAtOnce; ++i) {
      terms[i] = {kEmptyMax, 0.0F};
      o[i] = {0.0F, 0.0F, 0.0F, 0.0F};
      if (first + i < count) load(first + i, terms[i], o[i]);
    }
#pragma unroll
    for (int32_t i = 0; i < kPiecesAtOnce; ++i) origin = fmaxf(origin, terms[i].x);
    merged.RaiseTo(origin);
#pragma unroll
    for (int32_t i = 0; i < kPiecesAtOnce; ++i) merged.Add(terms[i], o[i]);
  }
  return merged;
}

// at(i): the column in piece i. kCached: pieces of this CTA; others are read past the first-level
// cache, which may hold an older launch's.
template <class T, bool kCached, class At>
__device__ __forceinline__ Merged MergePieces(int32_t count, const At& at, int32_t dim) {
  return MergeAll(count, [&](int32_t i, float2& terms, float4& o) {
    const float* piece = at(i);
    const auto* piece_terms = reinterpret_cast<const float2*>(piece + T::kHeadDim);
    const auto* piece_o = reinterpret_cast<const float4*>(piece + dim);
    terms = kCached ? *piece_terms : __ldcg(piece_terms);
    o = kCached ? *piece_o : __ldcg(piece_o);
  });
}

// Four dimensions of one column of a pair, whole.
template <class T>
__device__ __forceinline__ void WriteMerged(const DecodeArgs& args, const DecodeRow& row,
                                            const Pair& pair, const Merged& merged, int32_t column,
                                            int32_t dim) {
  const ColumnPlace place = PlaceOf(row, pair, args, column);
  const Finish finish = FinishColumn(row, place.q_head, merged.origin, merged.sum);
  const float x[4] = {merged.o.x * finish.factor, merged.o.y * finish.factor,
                      merged.o.z * finish.factor, merged.o.w * finish.factor};
  StoreOut(row, args.out_type, place.index * T::kHeadDim + dim, x);
  if (dim == 0 && row.lse != nullptr) row.lse[place.index] = finish.lse;
}

}  // namespace fp8kvd::kernels::cuda
