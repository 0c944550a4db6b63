// kernels/cuda/any/decode/combine.cuh: joins the pieces of pairs that were cut: first those of the
// warps of a CTA, then, by the last of a pair's CTAs, those of the CTAs. It waits for the others,
// whose numbers are lower: CTAs start in the order of their numbers. Which pieces a pair has and in
// which order they join follows from the cut alone, so the bits do not depend on who was slow.
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
  // The pair that began before this CTA, and the one that goes on after it; group -1: none.
  struct Cut {
    int32_t group;
    int32_t first_cta;
    int32_t ctas;
  } cut[2];
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

// Of a pair that begins in first_cta and is cut after it: its pieces lie one after the other. The
// next such pair begins in this one's last CTA or after it, and so its pieces begin beyond these.
__device__ __forceinline__ int32_t CtaPieceSlot(int32_t first_cta, int32_t cta) {
  return first_cta + cta;
}
template <class T>
__device__ __forceinline__ float* CtaPiece(const DecodeArgs& args, int32_t warps, int32_t first_cta,
                                           int32_t cta) {
  const int64_t slot = static_cast<int64_t>(gridDim.x) * warps + CtaPieceSlot(first_cta, cta);
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
      list.cut[0].group = list.cut[1].group = -1;
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

// Joins the `count` pieces of one group, at(i) each: into the output, or into the CTA's own piece
// of a cut pair.
template <class T, class At>
__device__ __forceinline__ void CombineInCta(const DecodeArgs& args, const CtaCut& cut,
                                             int32_t warps, int32_t group, const Owner& owner,
                                             int32_t count, const At& at, Team team,
                                             PieceList& list) {
  const Pair& pair = owner.pair;
  const bool begins_here = pair.units.first >= cut.units.first;
  const bool whole = begins_here && pair.units.end <= cut.units.end;
  const int32_t first_cta = begins_here ? blockIdx.x : FloorDiv(pair.units.first, cut.share);
  float* left = CtaPiece<T>(args, warps, first_cta, blockIdx.x);
  ForColumns<T>(team, pair.columns, [&](int32_t column, int32_t dim) {
    const Merged merged = MergePieces<T, true>(
        count, [&](int32_t i) { return at(i) + column * T::kPieceStride; }, dim);
    if (whole) {
      WriteMerged<T>(args, owner.row, pair, merged, column, dim);
      return;
    }
    float* to = left + column * T::kPieceStride;
    *reinterpret_cast<float4*>(to + dim) = merged.o;
    if (dim == 0) *reinterpret_cast<float2*>(to + T::kHeadDim) = {merged.origin, merged.sum};
  });
  if (whole || team.thread != 0) return;
  const int32_t ctas = FloorDiv(pair.units.end - 1, cut.share) - first_cta + 1;
  list.cut[begins_here ? 1 : 0] = {group, first_cta, ctas};
}

// Waits for the pieces of a cut pair's other CTAs, joins them with this one's and writes the
// output. The pieces come through shared memory where they fit: all of them under way at once,
// where loads would wait for each other.
template <class T>
__device__ __forceinline__ void CombineCtas(const DecodeArgs& args, const Owner& owner,
                                            const PieceList::Cut& cut, int32_t warps,
                                            uint8_t* shared, int32_t shared_bytes) {
  const Pair& pair = owner.pair;
  const Team all = {static_cast<int32_t>(threadIdx.x), static_cast<int32_t>(blockDim.x)};
  const float* pieces = CtaPiece<T>(args, warps, cut.first_cta, cut.first_cta);
  const bool in_shared = cut.ctas * T::kPieceBytes <= shared_bytes;
  const int32_t lane = all.thread % kWarpLanes;
  const int32_t warp = all.thread / kWarpLanes;
  for (int32_t i = warp + lane * warps; i < cut.ctas - 1; i += warps * kWarpLanes) {
    AwaitFlag(args.piece_flags + CtaPieceSlot(cut.first_cta, cut.first_cta + i));
  }
  __syncwarp();
  for (int32_t i = warp; in_shared && i < cut.ctas; i += warps) {
    const int32_t piece = i * T::kPieceBytes;
    for (int32_t at = piece + lane * 16; at < piece + T::kPieceBytes; at += kWarpLanes * 16) {
      CopyAsyncPastL1(shared + at, reinterpret_cast<const uint8_t*>(pieces) + at);
    }
  }
  WaitForCopies();
  __syncthreads();
  ForColumns<T>(all, pair.columns, [&](int32_t column, int32_t dim) {
    const float* of_column =
        (in_shared ? reinterpret_cast<const float*>(shared) : pieces) + column * T::kPieceStride;
    const auto at = [&](int32_t i) { return of_column + i * (T::kPieceBytes / 4); };
    const Merged merged = in_shared ? MergePieces<T, true>(cut.ctas, at, dim)
                                    : MergePieces<T, false>(cut.ctas, at, dim);
    WriteMerged<T>(args, owner.row, pair, merged, column, dim);
  });
}

// Joins the pieces of each pair that the CTA's warps left some of.
template <class T>
__device__ __forceinline__ void CombinePairs(const DecodeArgs& args, const CtaCut& cut,
                                             int32_t warps, const uint8_t* rings,
                                             int32_t ring_bytes, PieceList& list) {
  ListPieces<T>(args, warps, rings, ring_bytes, list);
  // Pairs are shared out over the warps: each to one, or to 2, 4 ... while there are enough.
  int32_t each_log2 = 0;
  while (list.groups << (each_log2 + 1) <= warps) ++each_log2;
  const int32_t teams = warps >> each_log2;
  const int32_t team_threads = kWarpLanes << each_log2;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t mine = (thread / kWarpLanes) >> each_log2;
  const Team team = {thread & (team_threads - 1), team_threads};
  for (int32_t group = mine; mine < teams && group < list.groups; group += teams) {
    const int32_t first = list.group_first[group];
    CombineInCta<T>(
        args, cut, warps, group, OwnerOf(list, group), list.group_first[group + 1] - first,
        [&](int32_t i) { return list.at[first + i]; }, team, list);
  }
}

// The same where the CTA has units of one pair alone: each of `count` warps, the first ones, has
// left a tail. Nothing needs to be listed.
template <class T>
__device__ __forceinline__ void CombineOnePair(const DecodeArgs& args, const CtaCut& cut,
                                               int32_t warps, int32_t count, const uint8_t* rings,
                                               int32_t ring_bytes, PieceList& list) {
  const PieceMarks& marks = list.marks[0];
  const Team all = {static_cast<int32_t>(threadIdx.x), static_cast<int32_t>(blockDim.x)};
  if (all.thread == 0) {
    list.mark[0] = 1;  // for OwnerOf
    list.group_first[0] = 0;
    list.cut[0].group = list.cut[1].group = -1;
  }
  const auto* first = reinterpret_cast<const float*>(rings);
  CombineInCta<T>(
      args, cut, warps, 0, {marks.tail, marks.tail_row}, count,
      [&](int32_t i) { return first + i * (ring_bytes / 4); }, all, list);
}

// The marks are filled in and the rings are done with; ends with the CTA's share of the work done.
template <class T>
__device__ __forceinline__ void Combine(const DecodeArgs& args, const CtaCut& cut, int32_t warps,
                                        uint8_t* rings, int32_t ring_bytes, PieceList& list) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const PieceMarks& marks = list.marks[thread / kWarpLanes];
  const Range& pair = marks.tail.units;
  const bool leaves = marks.head.units.first >= 0 || pair.first >= 0;
  // If for one warp, then for all that have work. Such a warp counts as one thread, others as all.
  const bool is_one_pair =
      pair.first >= 0 && pair.first <= cut.units.first && pair.end >= cut.units.end;
  const int32_t count = __syncthreads_count(leaves && (!is_one_pair || thread % kWarpLanes == 0));
  if (count == 0) return;
  if (count <= kWarpsLimit) {
    CombineOnePair<T>(args, cut, warps, count, rings, ring_bytes, list);
  } else {
    CombinePairs<T>(args, cut, warps, rings, ring_bytes, list);
  }
  __syncthreads();
  const PieceList::Cut& ends_here = list.cut[0];
  const int32_t cta = blockIdx.x;
  const bool joins = ends_here.group >= 0 && ends_here.first_cta + ends_here.ctas - 1 == cta;
  if (thread < 2 && list.cut[thread].group >= 0 && !(thread == 0 && joins)) {
    // Who sees the flag sees what the CTA's threads wrote before the barrier.
    RaiseFlag(args.piece_flags + CtaPieceSlot(list.cut[thread].first_cta, cta));
  }
  if (!joins) return;
  CombineCtas<T>(args, OwnerOf(list, ends_here.group), ends_here, warps, rings, warps * ring_bytes);
}

}  // namespace fp8kvd::kernels::cuda
