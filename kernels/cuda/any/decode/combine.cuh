// kernels/cuda/any/decode/combine.cuh: joins the pieces of pairs that were cut: first those of the
// warps of a CTA, then, by the last of a pair's CTAs, those of the CTAs (join_steps.h). It waits
// for others, whose numbers are lower: CTAs start in the order of their numbers. Which pieces a
// pair has and in which order they join follows from the cut alone, so the bits do not depend on
// who was slow.
#pragma once

#include <cstdint>

#include "kernels/cuda/any/decode/join_steps.h"
#include "kernels/cuda/any/decode/output.cuh"

namespace fp8kvd::kernels::cuda {

inline constexpr int32_t kWarpsLimit = 16;
inline constexpr int32_t kPiecesMax = 2 * kWarpsLimit;
static_assert(kPiecesMax == kWarpLanes, "a warp lists the pieces, one a lane");

// What a worker leaves: at most two pieces, of the pair that it began in the middle of (head), when
// more followed, and of the pair that it ended with (tail). No piece: a pair that starts at unit
// -1.
struct PieceMarks {
  Pair head;
  Pair tail;
  DecodeRow head_row;
  DecodeRow tail_row;
};

// The CTA's part of the cut. It lies in shared memory while the warps are at work.
struct CtaCut {
  Range parts;
  int32_t share;    // of each CTA
  int32_t uniform;  // WorkMap::uniform
  CutBy by;
};

// The pieces of a CTA, those of one pair together.
struct PieceList {
  CtaCut cut;
  PieceMarks marks[kWarpsLimit];
  const float* at[kPiecesMax];
  int32_t mark[kPiecesMax];             // 2 * worker, + 1 for a tail
  int32_t group_first[kPiecesMax + 1];  // into `at`: one group for each pair, then the end
  int32_t groups;
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
__device__ __forceinline__ float* HeadPiece(const DecodeArgs& args, int32_t workers,
                                            int32_t worker) {
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * workers + worker;
  return args.pieces + slot * PieceFloats(T::kColumns, T::kHeadDim);
}

// Of a pair that begins in first_cta and is cut after it: its pieces lie one after the other. The
// next such pair begins in this one's last CTA or after it, and so its pieces begin beyond these.
__device__ __forceinline__ int32_t CtaPieceSlot(int32_t first_cta, int32_t cta) {
  return first_cta + cta;
}
template <class T>
__device__ __forceinline__ float* CtaPiece(const DecodeArgs& args, int32_t workers,
                                           int32_t first_cta, int32_t cta) {
  const int64_t slot = static_cast<int64_t>(gridDim.x) * workers + CtaPieceSlot(first_cta, cta);
  return args.pieces + slot * PieceFloats(T::kColumns, T::kHeadDim);
}

// Lists the marked pieces. A tail lies in the worker's ring.
template <class T>
__device__ __forceinline__ void ListPieces(const DecodeArgs& args, int32_t workers,
                                           const uint8_t* rings, int32_t ring_bytes,
                                           PieceList& list) {
  const int32_t lane = threadIdx.x;
  if (lane < kWarpLanes) {
    const PieceMarks& marks = list.marks[lane / 2];
    const bool is_head = lane % 2 == 0;
    const int32_t unit = lane >= 2 * workers ? -1
                         : is_head           ? marks.head.units.first
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
                           : HeadPiece<T>(args, workers, lane / 2);
      if (leads) list.group_first[__popc(leaders & ((1U << lane) - 1U))] = place;
    }
    if (lane == 0) {
      list.groups = __popc(leaders);
      list.group_first[list.groups] = __popc(there);
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

// Of a pair that the CTA has units of.
struct CtaSpan {
  int32_t first_cta;  // that has any
  bool ends_here;
  int32_t units;  // of the pair

  __device__ __forceinline__ bool IsWhole() const { return ends_here && BeginsHere(); }
  __device__ __forceinline__ bool BeginsHere() const { return Before() == 0; }
  // How many CTAs have units of it before this one.
  __device__ __forceinline__ int32_t Before() const {
    return static_cast<int32_t>(blockIdx.x) - first_cta;
  }
};

__device__ __forceinline__ CtaSpan SpanOf(const WorkMap& map, const CtaCut& cut, const Pair& pair) {
  const int32_t first = cut.by == CutBy::kCosts ? FirstCost(map, pair) : pair.units.first;
  const int32_t units = pair.units.end - pair.units.first;
  const bool begins_here = first >= cut.parts.first;
  return {begins_here ? static_cast<int32_t>(blockIdx.x) : FloorDiv(first, cut.share),
          first + units <= cut.parts.end, units};
}

// Joins a pair's pieces in the CTA, at(i) each, and gives take(column, dim, merged).
template <class T, class At, class Take>
__device__ __forceinline__ void JoinInCta(const Pair& pair, int32_t count, const At& at,
                                          const Take& take) {
  const Team all = {static_cast<int32_t>(threadIdx.x), static_cast<int32_t>(blockDim.x)};
  ForColumns<T>(all, pair.columns, [&](int32_t column, int32_t dim) {
    const auto of_column = [&](int32_t i) { return at(i) + column * T::kPieceStride; };
    take(column, dim, MergePieces<T, true>(count, of_column, dim));
  });
}

// Four dimensions of a column of the CTA's own piece of a pair that is cut between CTAs.
template <class T>
__device__ __forceinline__ void LeaveMerged(float* piece, const Merged& merged, int32_t column,
                                            int32_t dim) {
  float* to = piece + column * T::kPieceStride;
  *reinterpret_cast<float4*>(to + dim) = merged.o;
  if (dim == 0) *reinterpret_cast<float2*>(to + T::kHeadDim) = {merged.origin, merged.sum};
}

// Waits for some pieces of a pair that is cut from first_cta on, joins them with this CTA's own and
// gives take(column, dim, merged). The pieces come through shared memory where they fit: all of
// them under way at once, where loads would wait for each other.
template <class T, class Pieces, class Take>
__device__ __forceinline__ void CombineCtas(const DecodeArgs& args, const Pair& pair,
                                            int32_t first_cta, const Pieces& which, int32_t workers,
                                            uint8_t* shared, int32_t shared_bytes,
                                            const Take& take) {
  const Team all = {static_cast<int32_t>(threadIdx.x), static_cast<int32_t>(blockDim.x)};
  const float* pieces = CtaPiece<T>(args, workers, first_cta, first_cta);
  const bool in_shared = which.count * T::kPieceBytes <= shared_bytes;
  const int32_t lane = all.thread % kWarpLanes;
  const int32_t warp = all.thread / kWarpLanes;
  const int32_t warps = workers * T::kWorkerWarps;
  for (int32_t i = warp + lane * warps; i < which.count - 1; i += warps * kWarpLanes) {
    AwaitFlag(args.piece_flags + CtaPieceSlot(first_cta, first_cta + which.At(i)));
  }
  __syncwarp();
  for (int32_t i = warp; in_shared && i < which.count; i += warps) {
    uint8_t* to = shared + i * T::kPieceBytes;
    const auto* from = reinterpret_cast<const uint8_t*>(pieces) + which.At(i) * T::kPieceBytes;
    for (int32_t at = lane * 16; at < T::kPieceBytes; at += kWarpLanes * 16) {
      CopyAsyncPastL1(to + at, from + at);
    }
  }
  WaitForCopies();
  __syncthreads();
  ForColumns<T>(all, pair.columns, [&](int32_t column, int32_t dim) {
    const float* of_column =
        (in_shared ? reinterpret_cast<const float*>(shared) : pieces) + column * T::kPieceStride;
    constexpr int32_t kFloats = T::kPieceBytes / 4;
    const auto copied = [&](int32_t i) { return of_column + i * kFloats; };
    const auto left = [&](int32_t i) { return of_column + which.At(i) * kFloats; };
    take(column, dim,
         in_shared ? MergePieces<T, true>(which.count, copied, dim)
                   : MergePieces<T, false>(which.count, left, dim));
  });
}

// Whether a pair joins in steps.
template <class T>
__device__ __forceinline__ bool InSteps(const CtaSpan& span, const CtaCut& cut,
                                        int32_t shared_bytes) {
  return JoinsInSteps(span.units, cut.share, FloorDiv(shared_bytes, T::kPieceBytes));
}

// CombineCtas by the pair's last CTA, which writes the output.
template <class T>
__device__ __forceinline__ void CombineAsLast(const DecodeArgs& args, const Owner& owner,
                                              const CtaSpan& span, bool in_steps, int32_t workers,
                                              uint8_t* shared, int32_t shared_bytes) {
  const auto combine = [&](const auto& which) {
    CombineCtas<T>(args, owner.pair, span.first_cta, which, workers, shared, shared_bytes,
                   [&](int32_t column, int32_t dim, const Merged& merged) {
                     WriteMerged<T>(args, owner.row, owner.pair, merged, column, dim);
                   });
  };
  if (in_steps) {
    combine(PiecesAfterSteps(span.Before()));
  } else {
    combine(PiecesInLine{0, span.Before() + 1});
  }
}

// The same where other CTAs left few pieces: these are read where they lie, and summed with this
// CTA's own, at(i) each of `count`, which need not be joined first.
template <class T, class At>
__device__ __forceinline__ void CombineWithFew(const DecodeArgs& args, const Owner& owner,
                                               int32_t first_cta, int32_t workers, int32_t count,
                                               const At& at) {
  const auto others = static_cast<int32_t>(blockIdx.x) - first_cta;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread < others) AwaitFlag(args.piece_flags + CtaPieceSlot(first_cta, first_cta + thread));
  __syncthreads();
  const float* pieces = CtaPiece<T>(args, workers, first_cta, first_cta);
  const Team all = {thread, static_cast<int32_t>(blockDim.x)};
  ForColumns<T>(all, owner.pair.columns, [&](int32_t column, int32_t dim) {
    const Merged merged = MergeAll(others + count, [&](int32_t i, float2& terms, float4& o) {
      const bool is_other = i < others;
      const float* piece = is_other ? pieces + i * (T::kPieceBytes / 4) : at(i - others);
      piece += column * T::kPieceStride;
      const auto* piece_terms = reinterpret_cast<const float2*>(piece + T::kHeadDim);
      const auto* piece_o = reinterpret_cast<const float4*>(piece + dim);
      terms = is_other ? __ldcg(piece_terms) : *piece_terms;
      o = is_other ? __ldcg(piece_o) : *piece_o;
    });
    WriteMerged<T>(args, owner.row, owner.pair, merged, column, dim);
  });
}

// What the CTA leaves of a pair is there: another one, which joins it, waits for it.
__device__ __forceinline__ void TellJoiningCta(const DecodeArgs& args, int32_t first_cta) {
  __syncthreads();
  // Who sees the flag sees what the CTA's threads wrote before the barrier.
  if (threadIdx.x == 0) RaiseFlag(args.piece_flags + CtaPieceSlot(first_cta, blockIdx.x));
}

// The CTA left pieces of one pair alone, as each does that is neither the pair's first nor its
// last: a tail of each of `count` workers, the first ones. Nothing needs to be listed.
template <class T>
__device__ __forceinline__ void CombineOnePair(const DecodeArgs& args, const WorkMap& map,
                                               int32_t workers, int32_t count, uint8_t* rings,
                                               int32_t ring_bytes, const PieceList& list) {
  const Owner owner = {list.marks[0].tail, list.marks[0].tail_row};
  const CtaSpan span = SpanOf(map, list.cut, owner.pair);
  float* piece = CtaPiece<T>(args, workers, span.first_cta, blockIdx.x);
  const auto* first = reinterpret_cast<const float*>(rings);
  const auto leave = [&](int32_t column, int32_t dim, const Merged& merged) {
    LeaveMerged<T>(piece, merged, column, dim);
  };
  JoinInCta<T>(
      owner.pair, count, [&](int32_t i) { return first + i * (ring_bytes / 4); },
      [&](int32_t column, int32_t dim, const Merged& merged) {
        if (span.IsWhole()) {
          WriteMerged<T>(args, owner.row, owner.pair, merged, column, dim);
        } else {
          leave(column, dim, merged);
        }
      });
  if (span.IsWhole()) return;
  const int32_t shared_bytes = workers * ring_bytes;
  const bool in_steps = InSteps<T>(span, list.cut, shared_bytes);
  if (span.ends_here) {
    __syncthreads();
    CombineAsLast<T>(args, owner, span, in_steps, workers, rings, shared_bytes);
    return;
  }
  if (in_steps && EndsStep(span.Before())) {
    __syncthreads();
    CombineCtas<T>(args, owner.pair, span.first_cta, PiecesOfStep(span.Before()), workers, rings,
                   shared_bytes, leave);
  }
  TellJoiningCta(args, span.first_cta);
}

// Of the CTA's pairs only the last may go on after it: another CTA waits for that piece, so it
// comes first. Only the first may have begun before; if it ends here, this CTA joins it, last.
template <class T>
__device__ __forceinline__ void CombinePairs(const DecodeArgs& args, const WorkMap& map,
                                             int32_t workers, uint8_t* rings, int32_t ring_bytes,
                                             PieceList& list) {
  ListPieces<T>(args, workers, rings, ring_bytes, list);
  const auto join = [&](int32_t group, const auto& take) {
    const int32_t first = list.group_first[group];
    JoinInCta<T>(
        OwnerOf(list, group).pair, list.group_first[group + 1] - first,
        [&](int32_t i) { return list.at[first + i]; }, take);
  };
  const auto leave = [&](int32_t group, int32_t first_cta) {
    float* piece = CtaPiece<T>(args, workers, first_cta, blockIdx.x);
    join(group, [&](int32_t column, int32_t dim, const Merged& merged) {
      LeaveMerged<T>(piece, merged, column, dim);
    });
  };
  int32_t groups = list.groups;
  const CtaSpan of_last = SpanOf(map, list.cut, OwnerOf(list, groups - 1).pair);
  if (!of_last.ends_here) {
    leave(--groups, of_last.first_cta);
    TellJoiningCta(args, of_last.first_cta);
    if (groups == 0) return;
  }
  const Owner first = OwnerOf(list, 0);
  const CtaSpan of_first = SpanOf(map, list.cut, first.pair);
  const bool are_few = of_first.Before() < kPiecesAtOnce;
  if (!of_first.BeginsHere() && !are_few) leave(0, of_first.first_cta);
  for (int32_t group = of_first.BeginsHere() ? 0 : 1; group < groups; ++group) {
    const Owner owner = OwnerOf(list, group);
    join(group, [&](int32_t column, int32_t dim, const Merged& merged) {
      WriteMerged<T>(args, owner.row, owner.pair, merged, column, dim);
    });
  }
  if (of_first.BeginsHere()) return;
  if (are_few) {
    CombineWithFew<T>(args, first, of_first.first_cta, workers, list.group_first[1],
                      [&](int32_t i) { return list.at[i]; });
    return;
  }
  __syncthreads();
  const int32_t shared_bytes = workers * ring_bytes;
  CombineAsLast<T>(args, first, of_first, InSteps<T>(of_first, list.cut, shared_bytes), workers,
                   rings, shared_bytes);
}

// The marks are filled in and the rings are done with; ends with the CTA's share of the work done.
template <class T>
__device__ __forceinline__ void Combine(const DecodeArgs& args, const WorkMap& map, int32_t workers,
                                        uint8_t* rings, int32_t ring_bytes, PieceList& list) {
  constexpr int32_t kWorkerThreads = kWarpLanes * T::kWorkerWarps;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const PieceMarks& marks = list.marks[thread / kWorkerThreads];
  const bool has_head = marks.head.units.first >= 0;
  // A worker that leaves one piece counts as one thread, others that leave any as all of theirs.
  const bool leaves = has_head || (marks.tail.units.first >= 0 && thread % kWorkerThreads == 0);
  const int32_t count = __syncthreads_count(leaves);
  if (count == 0) return;
  // One piece each of one pair: of the first and of the last of so many, and so of those between.
  const int32_t pair = list.marks[0].tail.units.first;
  if (count <= kWarpsLimit && pair >= 0 && list.marks[count - 1].tail.units.first == pair) {
    CombineOnePair<T>(args, map, workers, count, rings, ring_bytes, list);
  } else {
    CombinePairs<T>(args, map, workers, rings, ring_bytes, list);
  }
}

}  // namespace fp8kvd::kernels::cuda
