// kernels/cuda/any/decode/join_items.cuh: how items of batch_invariant join. Those of a pair are
// added one after the other, from the first on, whoever had which: so the bits follow from the row
// alone. A warp that has a pair from its first item on does so as it goes (FoldPiece), which leaves
// one piece; for each item after those there is a piece of its own. The CTA that has a pair's
// last item adds them up. It waits for those that have the others, whose numbers are lower
// (combine.cuh).
#pragma once

#include <cstdint>

#include "kernels/cuda/any/decode/combine.cuh"

namespace fp8kvd::kernels::cuda {

// Loads of so many pieces are under way together, where registers suffice. Of a long pair there are
// kInvariantItemsMax.
template <class T>
inline constexpr int32_t kItemsAtOnce = T::kColumns <= 16 ? 16 : 4;

template <class T>
__device__ __forceinline__ float* ItemPiece(const DecodeArgs& args, int32_t item) {
  return args.pieces + item * PieceFloats(T::kColumns, T::kHeadDim);
}

// Where a pair's pieces are: that of its first items, then one for each item that follows them.
template <class T>
struct PiecesOfPair {
  const float* first;
  int32_t folded;  // items in it
  int32_t count;   // of pieces

  __device__ __forceinline__ const float* At(int32_t i) const {
    const int32_t item = i == 0 ? 0 : i + folded - 1;
    return first + item * (T::kPieceBytes / 4);
  }
};

// One piece: the worker that has it has written the pair out.
template <class T>
__device__ __forceinline__ PiecesOfPair<T> PiecesOf(const DecodeArgs& args, const WorkMap& map,
                                                    const CtaCut& cut, int32_t workers,
                                                    const Range& items) {
  const int32_t cta = FloorDiv(items.first, cut.share);
  const Range of_cta = ShareAt({0, map.parts[map.rows_count]}, cut.share, cta);
  const int32_t share = ShareOf(of_cta.end - of_cta.first, workers, cut.uniform, 0);
  const int32_t worker = FloorDiv(items.first - of_cta.first, share);
  const int32_t end =
      T::kFoldsItems ? min(ShareAt(of_cta, share, worker).end, items.end) : items.first + 1;
  return {ItemPiece<T>(args, items.first), end - items.first, items.end - end + 1};
}

// As FoldPiece does.
template <class T>
__device__ __forceinline__ Merged AddUp(const PiecesOfPair<T>& pieces, int32_t column,
                                        int32_t dim) {
  constexpr int32_t kAtOnce = kItemsAtOnce<T>;
  const auto load = [&](int32_t i, float2& terms, float4& o) {
    const float* piece = pieces.At(i) + column * T::kPieceStride;
    terms = __ldcg(reinterpret_cast<const float2*>(piece + T::kHeadDim));
    o = __ldcg(reinterpret_cast<const float4*>(piece + dim));
  };
  float2 first_terms;
  Merged merged;
  load(0, first_terms, merged.o);
  merged.origin = first_terms.x;
  merged.sum = first_terms.y;
#pragma unroll 1
  for (int32_t first = 1; first < pieces.count; first += kAtOnce) {
    float2 terms[kAtOnce];
    float4 o[kAtOnce];
#pragma unroll
    for (int32_t i = 0; i < kAtOnce; ++i) {
      if (first + i < pieces.count) load(first + i, terms[i], o[i]);
    }
#pragma unroll
    for (int32_t i = 0; i < kAtOnce; ++i) {
      if (first + i == pieces.count) break;
      merged.RaiseTo(fmaxf(merged.origin, terms[i].x));
      merged.Add(terms[i], o[i]);
    }
  }
  return merged;
}

// The CTA's items are done.
template <class T>
__device__ __forceinline__ void JoinItems(const DecodeArgs& args, const WorkMap& map,
                                          const CtaCut& cut, int32_t workers) {
  __syncthreads();
  const Range mine = cut.parts;
  if (mine.first >= mine.end) return;
  const Team all = {static_cast<int32_t>(threadIdx.x), static_cast<int32_t>(blockDim.x)};
  const auto cta = static_cast<int32_t>(blockIdx.x);
  if (all.thread == 0 && ItemsAround(map, mine.end - 1).items.end > mine.end) {
    // Who sees the flag sees what the CTA's threads wrote before the barrier.
    RaiseFlag(args.piece_flags + cta);
  }
  ItemsOfPair of = ItemsAround(map, mine.first);
  if (of.items.end > mine.end) return;
  for (int32_t i = FloorDiv(of.items.first, cut.share) + all.thread; i < cta; i += all.threads) {
    AwaitFlag(args.piece_flags + i);
  }
  __syncthreads();
  for (;;) {
    const PiecesOfPair<T> pieces = PiecesOf<T>(args, map, cut, workers, of.items);
    if (pieces.count > 1) {
      const DecodeRow& row = args.rows[of.row];
      const Pair pair = PairInRow(args, T::kGrain, row, of.pair);
      ForColumns<T>(all, pair.columns, [&](int32_t column, int32_t dim) {
        WriteMerged<T>(args, row, pair, AddUp(pieces, column, dim), column, dim);
      });
    }
    if (of.items.end == mine.end) return;
    of = ItemsAround(map, of.items.end);
    if (of.items.end > mine.end) return;
  }
}

}  // namespace fp8kvd::kernels::cuda
