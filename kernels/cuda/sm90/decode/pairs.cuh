// kernels/cuda/sm90/decode/pairs.cuh: what one CTA does in a launch that gives each pair a cluster
// of its own (of one CTA or more). No scan over rows, no pieces in global memory, no counting: the
// warps of the cluster cut the pair's units evenly, join in shared memory and then across the
// cluster. For launches whose rows have equally many pairs.
//
// Grid: a cluster for each pair. Shared memory: PairsLayout.
#pragma once

#include <cstdint>

#include "kernels/cuda/any/decode/combine.cuh"
#include "kernels/cuda/any/decode/new_tokens.cuh"
#include "kernels/cuda/any/decode/pipeline.cuh"
#include "kernels/cuda/any/decode/query.cuh"
#include "kernels/cuda/sm90/decode/cluster.cuh"
#include "kernels/cuda/sm90/decode/join_share.h"
#include "kernels/cuda/sm90/decode/ring.cuh"

namespace fp8kvd::kernels::cuda {

// Dynamic shared memory of a CTA, in bytes.
struct PairsLayout {
  int32_t full;         // barriers, [warps][stages]
  int32_t rows;         // a copy of the row, [warps]
  int32_t inbox;        // float4 [items of a CTA][ctas]: what the cluster's CTAs send here
  int32_t inbox_terms;  // float2, the same
  int32_t inbox_full;   // barrier
  int32_t rings;        // [warps][ring_bytes]: stages, then the query; in the end the warp's piece
  int32_t ring_bytes;
  int32_t total;
};

// Entries of a CTA's inbox: of each item that it joins, one from each CTA of the cluster.
template <class T>
__host__ __device__ constexpr int32_t InboxEntries(int32_t cluster) {
  return cluster > 1 ? JoinPlacesMax(T::kColumns * (T::kHeadDim / 4), cluster) * cluster : 0;
}

template <class T>
__host__ __device__ constexpr PairsLayout PairsLayoutOf(int32_t warps, int32_t stages,
                                                        int32_t cluster) {
  PairsLayout layout{};
  layout.full = 0;
  layout.inbox_full = warps * stages * 8;
  layout.rows = (layout.inbox_full + 8 + 15) / 16 * 16;
  layout.inbox = layout.rows + warps * static_cast<int32_t>(sizeof(DecodeRow));
  layout.inbox = (layout.inbox + 15) / 16 * 16;
  const int32_t entries = InboxEntries<T>(cluster);
  layout.inbox_terms = layout.inbox + entries * 16;
  layout.rings = (layout.inbox_terms + entries * 8 + 127) / 128 * 128;
  const int32_t ring = stages * T::kUnitBytes + T::kQueryBytes;
  layout.ring_bytes = ring > T::kPieceBytes ? ring : (T::kPieceBytes + 127) / 128 * 128;
  layout.total = layout.rings + warps * layout.ring_bytes;
  return layout;
}

// A warp's units of one pair: every `warps`-th of its CTA's, so that the warps read neighbouring
// memory at the same time.
template <class T>
struct PairSource {
  const DecodeRow& row;
  int32_t kv_head;
  int32_t first;  // from the sequence's start
  int32_t warps;

  __device__ __forceinline__ UnitSource At(int32_t index) const {
    return SourceInPair<T>(row, kv_head, first + index * warps);
  }
};

// Item i of a pair's columns and fours of dimensions: what the CTA's warps have of it.
template <class T>
__device__ __forceinline__ Merged MergeWarps(int32_t pieces, int32_t i, const uint8_t* shared,
                                             const PairsLayout& layout) {
  constexpr int32_t kFours = T::kHeadDim / 4;
  const float* of_column =
      reinterpret_cast<const float*>(shared + layout.rings) + i / kFours * T::kPieceStride;
  return MergePieces<T, true>(
      pieces, [&](int32_t j) { return of_column + j * (layout.ring_bytes / 4); }, i % kFours * 4);
}

// One thread makes the barrier before the CTA arrives at the cluster.
__device__ __forceinline__ void MakeInbox(uint8_t* shared, const PairsLayout& layout) {
  if (threadIdx.x == 0) {
    BulkRing::Init(reinterpret_cast<uint64_t*>(shared + layout.inbox_full));
    BulkRing::FenceInit();
  }
  __syncwarp();
}

// Joins the pieces of this CTA's warps, and those of the cluster's CTAs, into the output. All CTAs
// of the cluster have started.
template <class T>
__device__ __forceinline__ void JoinPair(const DecodeArgs& args, const DecodeRow& row,
                                         const Pair& pair, int32_t pieces, uint8_t* shared,
                                         const PairsLayout& layout) {
  constexpr int32_t kFours = T::kHeadDim / 4;
  const int32_t cluster = ClusterCtas();
  const int32_t fours = pair.columns * kFours;
  __syncthreads();
  if (cluster == 1) {
    for (int32_t i = threadIdx.x; i < fours; i += blockDim.x) {
      const Merged merged = MergeWarps<T>(pieces, i, shared, layout);
      WriteMerged<T>(args, row, pair, merged, i / kFours, i % kFours * 4);
    }
    return;
  }
  const int32_t rank = ClusterRank();
  const JoinShare share = {31 - __clz(cluster)};  // a power of two
  const int32_t mine = share.CountOf(fours, rank);
  auto* inbox = reinterpret_cast<float4*>(shared + layout.inbox);
  auto* inbox_terms = reinterpret_cast<float2*>(shared + layout.inbox_terms);
  auto* inbox_full = reinterpret_cast<uint64_t*>(shared + layout.inbox_full);
  if (threadIdx.x == 0) {
    constexpr int32_t kEntryBytes = sizeof(float4) + sizeof(float2);
    BulkRing::Expect(mine * cluster * kEntryBytes, inbox_full);
  }
  for (int32_t i = threadIdx.x; i < fours; i += blockDim.x) {
    const Merged merged = MergeWarps<T>(pieces, i, shared, layout);
    const int32_t to = share.CtaOf(i);
    const int32_t slot = share.PlaceOf(i) * cluster + rank;
    const uint32_t full = AddressInCta(inbox_full, to);
    SendToCluster(AddressInCta(inbox + slot, to), merged.o, full);
    SendToCluster(AddressInCta(inbox_terms + slot, to), float2{merged.origin, merged.sum}, full);
  }
  BulkRing::Wait(inbox_full, 0);
  for (int32_t place = threadIdx.x; place < mine; place += blockDim.x) {
    const int32_t first = place * cluster;
    const Merged merged = MergeAll(cluster, [&](int32_t c, float2& terms, float4& o) {
      terms = inbox_terms[first + c];
      o = inbox[first + c];
    });
    const int32_t at = share.ItemAt(rank, place);
    WriteMerged<T>(args, row, pair, merged, at / kFours, at % kFours * 4);
  }
}

// The first codes are expanded while the query is on its way.
template <class T>
inline constexpr bool kKeysAhead = (T::kFp8 && T::kUnitTiles == T::kTilesAtOnce);

// Whether the query fits f16 is asked behind the first products, not before them. What mends it
// then stands between these and their scores: that costs more than it wins where it is much code,
// or a small query soon looked through.
template <class T>
inline constexpr bool kAsksBehindProducts = (T::kTilesAtOnce * T::kNTiles <= 2 && T::kHeadDim > 64);

// A pair's query on its way to a warp: to its registers, or to the stage where they do not suffice.
// What can be known before it may be read is found out by the constructor.
template <class T>
class ComingQuery {
 public:
  __device__ __forceinline__ ComingQuery(const DecodeArgs& args, const DecodeRow& row,
                                         const Pair& pair, uint8_t* stage, int32_t lane)
      : args_(args), row_(row), pair_(pair), place_(args, row, pair, lane), stage_(stage) {}

  // Sets it out, also a second time. It is bf16.
  __device__ __forceinline__ void Ask(int32_t lane, Query<T>& q) const {
    if constexpr (T::kQueryInShared) {
      stage_.Fetch(args_, row_, pair_, lane);
    } else {
      place_.Load(lane, q);
    }
  }
  // Until it is in q.
  __device__ __forceinline__ void Await() const {
    if constexpr (T::kQueryInShared) WaitForCopies();
  }

 private:
  const DecodeArgs& args_;
  const DecodeRow& row_;
  const Pair& pair_;
  const QueryPlace<T> place_;
  const QueryStage<T> stage_;
};

// A warp's units, from before the query that was asked for is there.
template <class T, class Ring, class Pipeline>
__device__ __forceinline__ void AttendAsQueryComes(const ComingQuery<T>& query, Pipeline& pipeline,
                                                   Attention<T>& attention, const Stretch& stretch,
                                                   int32_t lane, Query<T>& q, Accumulator<T>& acc,
                                                   int32_t let_next_at) {
  if constexpr (kKeysAhead<T>) {
    FirstKeys<T> keys;
    uint8_t* unit = pipeline.Wait();
    keys.Load(unit, lane);
    query.Await();
    const auto attend = [&](const auto& fits, const auto& scale) {
      acc.Clear();
      AttendFrom<T, Ring>(keys, unit, pipeline, attention, stretch, lane, q, acc, let_next_at, fits,
                          scale);
    };
    if constexpr (kAsksBehindProducts<T>) {
      const QueryInF16<T> as_it_is(q);
      as_it_is.Store(q);
      attend([&] { return as_it_is.Fits(); },
             [&] {
               query.Ask(lane, q);
               query.Await();
               QueryInF16<T> scaled(q);
               q.down = scaled.Scale();
               scaled.Store(q);
               attention.CountQuery(q);
             });
    } else {
      MakeOperand<T>(q);
      attention.CountQuery(q);
      attend([] { return true; }, [] {});
    }
  } else {
    query.Await();
    MakeOperand<T>(q);
    attention.CountQuery(q);
    acc.Clear();
    AttendUnits<T, Ring>(pipeline, attention, stretch, lane, q, acc, let_next_at);
  }
}

template <class T, class Ring>
__device__ __forceinline__ void DecodePair(const DecodeArgs& args, int32_t row_pairs,
                                           int32_t stages, int32_t near_units,
                                           bool lets_next_late) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int32_t lane = threadIdx.x % kWarpLanes;
  const int32_t warps = blockDim.x / kWarpLanes;
  const int32_t warp = threadIdx.x / kWarpLanes;
  const int32_t cluster = ClusterCtas();
  const PairsLayout layout = PairsLayoutOf<T>(warps, stages, cluster);
  uint8_t* ring = shared + layout.rings + warp * layout.ring_bytes;

  if (args.cache == CacheState::kSettled && !lets_next_late) LetNextLaunchStart();
  if (cluster > 1) {
    MakeInbox(shared, layout);
    ArriveAtCluster();
  }
  if (args.cache == CacheState::kUnsettled) WaitForPreviousLaunch();
  const int32_t at = FloorDiv(blockIdx.x, cluster);
  const int32_t row_index = FloorDiv(at, row_pairs);
  DecodeRow& row = reinterpret_cast<DecodeRow*>(shared + layout.rows)[warp];
  CopyRow(args.rows[row_index], row, lane);
  __syncwarp();
  const Pair pair = PairInRow(args, T::kGrain, row, at - row_index * row_pairs);
  const int32_t units = pair.units.end;
  const Range of_cta = ShareAt({0, units}, CeilDiv(units, cluster), ClusterRank());
  const int32_t cta_units = of_cta.end - of_cta.first;
  const int32_t mine = CeilDiv(max(cta_units - warp, 0), warps);
  const int32_t first = pair.first_unit + of_cta.first + warp;
  Pipeline<T, Ring, PairSource<T>> pipeline(
      {row, pair.kv_head, first, warps}, {0, mine}, stages, ring,
      reinterpret_cast<uint64_t*>(shared + layout.full) + warp * stages);
  pipeline.Start(args.cache == CacheState::kBelowQueries || args.tokens != nullptr);
  const bool has_last = mine > 0 && of_cta.first + warp + (mine - 1) * warps == units - 1;
  if (has_last) AppendTokenOfPair<T, Ring>(args, row_index, row, pair);
  uint8_t* const stage = ring + stages * T::kUnitBytes;
  const ComingQuery<T> query(args, row, pair, stage, lane);
  Attention<T> attention = {row, args.group_inverse, pair.column_first};
  WaitForPreviousLaunch();
  if (args.cache != CacheState::kSettled && !lets_next_late) LetNextLaunchStart();
  if (mine > 0) {
    Query<T> q(reinterpret_cast<uint4*>(stage));
    query.Ask(lane, q);
    pipeline.Start(false);
    if (near_units > 0) pipeline.BringNear(near_units);
    Accumulator<T> acc;
    const Stretch stretch = {first * T::kUnitTokens, warps * T::kUnitTokens, mine};
    AttendAsQueryComes<T, Ring>(query, pipeline, attention, stretch, lane, q, acc,
                                lets_next_late ? near_units : -1);
    Close<T>(acc);
    __syncwarp();  // the ring is free
    WritePiece<T>(acc, lane, reinterpret_cast<float*>(ring));
  }
  if (cluster > 1) WaitForCluster();
  JoinPair<T>(args, row, pair, min(cta_units, warps), shared, layout);
}

}  // namespace fp8kvd::kernels::cuda
