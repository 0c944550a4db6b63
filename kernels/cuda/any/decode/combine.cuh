// kernels/cuda/any/decode/combine.cuh: joins the pieces of pairs that were cut: first those of the
// warps of a CTA, then, by the last CTA to arrive at a pair, those of the CTAs. Which pieces a pair
// has and in which order they join follows from the cut alone, so the bits do not depend on who
// came last.
#pragma once

#include <cstdint>

#include "kernels/cuda/any/decode/output.cuh"

namespace fp8kvd::kernels::cuda {

inline constexpr int32_t kWarpsLimit = 16;
inline constexpr int32_t kPiecesMax = 2 * kWarpsLimit;
static_assert(kPiecesMax == kWarpLanes, "a warp lists the pieces, one a lane");

// What a warp leaves: at most two pieces, of the pair that it began in the middle of (head), when
// more followed, and of the pair that it ended with (tail). No piece: a pair that starts at unit
// -1.
struct PieceMarks {
  Pair head;
  Pair tail;
  DecodeRow head_row;
  DecodeRow tail_row;
};

// The pieces of a CTA, those of one pair together.
struct PieceList {
  PieceMarks marks[kWarpsLimit];
  const float* at[kPiecesMax];
  int32_t mark[kPiecesMax];             // 2 * warp, + 1 for a tail
  int32_t group_first[kPiecesMax + 1];  // into `at`: one group for each pair, then the end
  int32_t groups;
  int32_t
      cut_group[2];  // the pair that began before this CTA, the one that goes on after it; or -1
  bool last[2];      // this CTA came last to it
};

// The CTA's part of the cut.
struct CtaCut {
  Range units;    // of this CTA
  int32_t share;  // units of each CTA
};

// What a group's pieces are of.
struct Owner {
  const Pair& pair;
  const DecodeRow& row;
};

__device__ __forceinline__ Owner OwnerOf(const PieceList& list, int32_t group) {
  const int32_t mark = list.mark[list.group_first[group]];
  const PieceMarks& marks = list.marks[mark / 2];
  return mark % 2 == 0 ? Owner{marks.head, marks.head_row} : Owner{marks.tail, marks.tail_row};
}

template <class T>
__device__ __forceinline__ float* HeadPiece(const DecodeArgs& args, int32_t warps, int32_t warp) {
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * warps + warp;
  return args.pieces + slot * PieceFloats(T::kColumns, T::kHeadDim);
}

// second: of the pair that goes beyond the CTA's end and began in it.
template <class T>
__device__ __forceinline__ float* CtaPiece(const DecodeArgs& args, int32_t warps, int32_t cta,
                                           bool second) {
  const int64_t slot =
      static_cast<int64_t>(gridDim.x) * warps + 2 * int64_t{cta} + (second ? 1 : 0);
  return args.pieces + slot * PieceFloats(T::kColumns, T::kHeadDim);
}

// Lists the marked pieces. A tail lies in the warp's ring.
template <class T>
__device__ __forceinline__ void ListPieces(const DecodeArgs& args, int32_t warps,
                                           const uint8_t* rings, int32_t ring_bytes,
                                           PieceList& list) {
  const int32_t lane = threadIdx.x;
  if (lane < kWarpLanes) {
    const PieceMarks& marks = list.marks[lane / 2];
    const bool is_head = lane % 2 == 0;
    const int32_t unit = lane >= 2 * warps ? -1
                         : is_head         ? marks.head.units.first
                                           : marks.tail.units.first;
    const uint32_t there = __ballot_sync(kAllLanes, unit >= 0);
    const uint32_t below = there & ((1U << lane) - 1U);
    const int32_t unit_before = __shfl_sync(kAllLanes, unit, below == 0 ? 0 : 31 - __clz(below));
    const bool leads = unit >= 0 && (below == 0 || unit_before != unit);
    const uint32_t leaders = __ballot_sync(kAllLanes, leads);
    if (unit >= 0) {
      const int32_t place = __popc(below);
      list.mark[place] = lane;
      const uint8_t* ring = rings + lane / 2 * ring_bytes;
      const bool in_ring = !is_head || ring_bytes >= 2 * T::kPieceBytes;  // BringBackHead
      list.at[place] = in_ring
                           ? reinterpret_cast<const float*>(ring + (is_head ? T::kPieceBytes : 0))
                           : HeadPiece<T>(args, warps, lane / 2);
      if (leads) list.group_first[__popc(leaders & ((1U << lane) - 1U))] = place;
    }
    if (lane == 0) {
      list.groups = __popc(leaders);
      list.group_first[list.groups] = __popc(there);
      list.cut_group[0] = list.cut_group[1] = -1;
    }
  }
  __syncthreads();
}

// Some threads of the CTA that do one thing together.
struct Team {
  int32_t thread;
  int32_t threads;
};

// Calls visit(column, dim) for four dimensions at a time, spread over the team.
template <class T, class Visit>
__device__ __forceinline__ void ForColumns(Team team, int32_t columns, const Visit& visit) {
  constexpr int32_t kFours = T::kHeadDim / 4;
  for (int32_t i = team.thread; i < columns * kFours; i += team.threads) {
    visit(i / kFours, i % kFours * 4);
  }
}

// Joins the pieces of one group: into the output, or into the CTA's own piece of a cut pair.
template <class T>
__device__ __forceinline__ void CombineInCta(const DecodeArgs& args, const CtaCut& cut,
                                             int32_t warps, int32_t group, Team team,
                                             PieceList& list) {
  const Owner owner = OwnerOf(list, group);
  const Pair& pair = owner.pair;
  const int32_t first = list.group_first[group];
  const int32_t count = list.group_first[group + 1] - first;
  const bool begins_here = pair.units.first >= cut.units.first;
  const bool whole = begins_here && pair.units.end <= cut.units.end;
  float* left = CtaPiece<T>(args, warps, blockIdx.x, begins_here);
  ForColumns<T>(team, pair.columns, [&](int32_t column, int32_t dim) {
    const Merged merged = MergePieces<T, true>(
        count, [&](int32_t i) { return list.at[first + i] + column * T::kPieceStride; }, dim);
    if (whole) {
      WriteMerged<T>(args, owner.row, pair, merged, column, dim);
      return;
    }
    float* to = left + column * T::kPieceStride;
    *reinterpret_cast<float4*>(to + dim) = merged.o;
    if (dim == 0) *reinterpret_cast<float2*>(to + T::kHeadDim) = {merged.max, merged.sum};
  });
  if (!whole && team.thread == 0) list.cut_group[begins_here ? 1 : 0] = group;
}

// All CTAs of the pair have left their pieces; writes the output. The pieces come through shared
// memory where they fit: all of them under way at once, where loads would wait for each other.
template <class T>
__device__ __forceinline__ void CombineCtas(const DecodeArgs& args, const Owner& owner,
                                            const CtaCut& cut, int32_t warps, uint8_t* shared,
                                            int32_t shared_bytes) {
  const Pair& pair = owner.pair;
  const int32_t first = FloorDiv(pair.units.first, cut.share);
  const int32_t count = FloorDiv(pair.units.end - 1, cut.share) - first + 1;
  const Team all = {static_cast<int32_t>(threadIdx.x), static_cast<int32_t>(blockDim.x)};
  const auto in_global = [&](int32_t i) { return CtaPiece<T>(args, warps, first + i, i == 0); };
  if (count * T::kPieceBytes > shared_bytes) {
    ForColumns<T>(all, pair.columns, [&](int32_t column, int32_t dim) {
      const Merged merged = MergePieces<T, false>(
          count, [&](int32_t i) { return in_global(i) + column * T::kPieceStride; }, dim);
      WriteMerged<T>(args, owner.row, pair, merged, column, dim);
    });
    return;
  }
  constexpr int32_t kParts = T::kPieceBytes / 16;
  for (int32_t i = all.thread; i < count * kParts; i += all.threads) {
    CopyAsyncPastL1(shared + i * 16,
                    reinterpret_cast<const uint8_t*>(in_global(i / kParts)) + i % kParts * 16);
  }
  WaitForCopies();
  __syncthreads();
  ForColumns<T>(all, pair.columns, [&](int32_t column, int32_t dim) {
    const float* of_column = reinterpret_cast<const float*>(shared) + column * T::kPieceStride;
    const Merged merged = MergePieces<T, true>(
        count, [&](int32_t i) { return of_column + i * (T::kPieceBytes / 4); }, dim);
    WriteMerged<T>(args, owner.row, pair, merged, column, dim);
  });
  __syncthreads();
}

// The marks are filled in and the rings are done with; ends with the CTA's share of the work done.
template <class T>
__device__ __forceinline__ void Combine(const DecodeArgs& args, const CtaCut& cut, int32_t warps,
                                        uint8_t* rings, int32_t ring_bytes, PieceList& list) {
  const PieceMarks& marks = list.marks[threadIdx.x / kWarpLanes];
  if (__syncthreads_or(marks.head.units.first >= 0 || marks.tail.units.first >= 0) == 0) return;
  ListPieces<T>(args, warps, rings, ring_bytes, list);
  // Pairs are shared out over the warps: each to one warp, or to several while there are enough.
  const int32_t warps_each = max(warps / max(list.groups, 1), 1);
  const int32_t teams = warps / warps_each;
  const int32_t team_threads = warps_each * kWarpLanes;
  const int32_t mine = threadIdx.x / team_threads;
  const Team team = {static_cast<int32_t>(threadIdx.x) % team_threads, team_threads};
  for (int32_t group = mine; mine < teams && group < list.groups; group += teams) {
    CombineInCta<T>(args, cut, warps, group, team, list);
  }
  __syncthreads();
  if (list.cut_group[0] < 0 && list.cut_group[1] < 0) return;
  if (threadIdx.x < 2) {
    const int32_t group = list.cut_group[threadIdx.x];
    bool last = false;
    if (group >= 0) {
      const Range units = OwnerOf(list, group).pair.units;
      const uint32_t first = FloorDiv(units.first, cut.share);
      const uint32_t others = FloorDiv(units.end - 1, cut.share) - first;
      // What the CTA's threads wrote goes before the count, which is back at zero after the last.
      __threadfence();
      last = atomicInc(args.arrivals + first, others) == others;
    }
    list.last[threadIdx.x] = last;
  }
  __syncthreads();
#pragma unroll 1
  for (int32_t i = 0; i < 2; ++i) {
    if (!list.last[i]) continue;
    __threadfence();
    CombineCtas<T>(args, OwnerOf(list, list.cut_group[i]), cut, warps, rings, warps * ring_bytes);
  }
}

}  // namespace fp8kvd::kernels::cuda
