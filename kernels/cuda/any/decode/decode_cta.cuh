// kernels/cuda/any/decode/decode_cta.cuh: what one CTA of a decode launch does, on any
// architecture.
//
// Grid: any number of CTAs of 1 ... kWorkersMax workers, which are warps, or where T says so four
// warps each. The launch's units are cut into one contiguous range for each CTA, and that into one
// for each worker. A worker reads its range through a ring of its own and goes through it pair by
// pair. A pair that it saw whole it writes out; of others it leaves a piece (combine.cuh; with
// batch_invariant join_items.cuh). Shared memory: SharedLayout. Bytes read: each tile with a
// visible token once for each block of kColumns query columns; the query once for each worker that
// has units of the pair.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/any/decode/combine.cuh"
#include "kernels/cuda/any/decode/join_items.cuh"
#include "kernels/cuda/any/decode/new_tokens.cuh"
#include "kernels/cuda/any/decode/pipeline.cuh"
#include "kernels/cuda/any/decode/query.cuh"

namespace fp8kvd::kernels::cuda {

// What a warp knows of the pair that it is at and of the next one.
struct WarpState {
  DecodeRow row[2];
  Pair pair[2];
};

// Dynamic shared memory of a CTA, in bytes.
struct SharedLayout {
  int32_t full;    // barriers, [workers][stages]
  int32_t map;     // WorkMap
  int32_t pieces;  // PieceList
  int32_t pace;    // PaceTerms
  int32_t states;  // WarpState, [warps]
  int32_t rings;   // [workers][ring_bytes]: stages, then the query, then the scratch
  int32_t ring_bytes;
  int32_t total;
};

template <class T>
__host__ __device__ constexpr SharedLayout LayoutOf(int32_t rows_count, int32_t workers,
                                                    int32_t stages) {
  const int32_t warps = workers * T::kWorkerWarps;
  SharedLayout layout{};
  layout.full = 0;
  layout.map = layout.full + workers * stages * 8;
  const int32_t map_end = layout.map + MapInts(rows_count, warps) * 4;
  layout.pieces = (map_end + 15) / 16 * 16;
  layout.pace = layout.pieces + (static_cast<int32_t>(sizeof(PieceList)) + 15) / 16 * 16;
  layout.states = layout.pace + PaceTerms::Bytes(warps);
  const int32_t states_end = layout.states + warps * static_cast<int32_t>(sizeof(WarpState));
  layout.rings = (states_end + 127) / 128 * 128;
  const int32_t ring = stages * T::kUnitBytes + T::kQueryBytes + T::kScratchBytes;
  layout.ring_bytes = ring > T::kPieceBytes ? ring : (T::kPieceBytes + 127) / 128 * 128;
  layout.total = layout.rings + workers * layout.ring_bytes;
  return layout;
}

// Units beyond its rings, at most, that a CTA has brought near before it waits for the launch
// before. More win nothing (docs/performance.md).
inline constexpr int32_t kNearUnits = 8;

// A launch that lets the next one start late does so when of each CTA the first warp has no more
// units to set out than these, so that CTAs that are done before the others make room for it.
inline constexpr int32_t kLastUnits = 3;

template <class T>
__device__ __forceinline__ int32_t WorkerOfThread() {
  return threadIdx.x / (kWarpLanes * T::kWorkerWarps);
}
template <class T>
__device__ __forceinline__ int32_t WorkersOfCta() {
  return blockDim.x / (kWarpLanes * T::kWorkerWarps);
}
template <class T>
__device__ __forceinline__ bool IsFirstWarpOfWorker() {
  return threadIdx.x / kWarpLanes % T::kWorkerWarps == 0;
}
// All warps of the worker have come as far.
template <class T>
__device__ __forceinline__ void SyncWorker() {
  if constexpr (T::kWorkerWarps == 1) {
    __syncwarp();
  } else {
    SyncThreadsOr(1 + WorkerOfThread<T>(), kWarpLanes * T::kWorkerWarps, false);
  }
}

// A warp's share in a worker's part of the launch.
template <class T, class Ring>
class Worker {
 public:
  using PaceKind = std::conditional_t<Ring::kPaces && T::kPaced, Pace, NoPace>;
  using Units = Pipeline<T, Ring, CutSource<T>, PaceKind>;

  __device__ __forceinline__ Worker(const DecodeArgs& args, const WorkMap& map, Range units,
                                    int32_t row, uint8_t* ring, int32_t ring_bytes, uint8_t* query,
                                    WarpState& state, PieceMarks& marks, int32_t let_next_at)
      : args_(args),
        map_(map),
        units_(units),
        ring_(ring),
        ring_bytes_(ring_bytes),
        query_(query),
        state_(state),
        marks_(marks),
        let_next_at_(let_next_at),
        row_(row) {
    if (IsFirstWarpOfWorker<T>() && Lane() == 0) {
      marks_.head.units.first = marks_.tail.units.first = -1;
    }
    __syncwarp();
    if (HasWork()) Look(units.first, 0);
  }

  // All but the look at the first pair, which reads rows alone. The queries have to be there.
  __device__ __forceinline__ void Run(Units& pipeline) {
    if constexpr (T::kWorkerWarps > 1) SyncWorker<T>();  // marks and the ring's barriers are there
    if (!HasWork()) return;
    if constexpr (!T::kQueryInShared) Fetch(0);
    int32_t slot = 0;
    for (int32_t unit = units_.first; unit < units_.end; slot ^= 1) {
      unit = AttendPair(pipeline, unit, slot);
    }
    BringBackHead();
  }

 private:
  __device__ __forceinline__ bool HasWork() const { return units_.first < units_.end; }
  __device__ __forceinline__ static int32_t Lane() { return threadIdx.x % kWarpLanes; }

  // Says that the worker leaves a piece of this pair.
  __device__ __forceinline__ static void Mark(const DecodeRow& row, const Pair& pair,
                                              DecodeRow& row_mark, Pair& mark) {
    if (!IsFirstWarpOfWorker<T>()) return;
    CopyRow(row, row_mark, Lane());
    if (Lane() == 0) mark = pair;
  }

  // Fills a slot of the state with the pair of a unit at or after the row last looked at.
  __device__ __forceinline__ void Look(int32_t unit, int32_t slot) {
    while (unit >= map_.units[row_ + 1]) ++row_;
    __syncwarp();  // all lanes have done with what the slot held
    CopyRow(args_.rows[row_], state_.row[slot], Lane());
    __syncwarp();
    const Pair pair = PairAt(args_, T::kGrain, map_, state_.row[slot], row_, unit);
    if (Lane() == 0) state_.pair[slot] = pair;
    __syncwarp();
  }

  __device__ __forceinline__ void Fetch(int32_t slot) const {
    query_.Fetch(args_, state_.row[slot], state_.pair[slot], Lane());
  }

  // One pair's part of the range, from unit `begin` on. Returns its end.
  __device__ __forceinline__ int32_t AttendPair(Units& pipeline, int32_t begin, int32_t slot) {
    [[maybe_unused]] const int32_t lane = Lane();
    const DecodeRow& row = state_.row[slot];
    const Pair& pair = state_.pair[slot];
    int32_t end = min(pair.units.end, units_.end);
    if (args_.batch_invariant) {
      end = min(end, begin + InvariantItemUnits(row, args_.group, T::kGrain));
    }
    const int32_t token = (pair.first_unit + begin - pair.units.first) * T::kUnitTokens;
    const Stretch stretch = {token, T::kUnitTokens, end - begin};
    Attention<T> attention = {row, args_.group_inverse, pair.column_first};
    if constexpr (T::kWorkerWarps > 1) {
      typename T::Attends attends(query_.shared());
      attends.TakeQuery(args_, row, pair);
      if (end < units_.end) Look(end, slot ^ 1);
      Leave(attends.template Attend<Ring>(pipeline, attention, stretch, let_next_at_), {begin, end},
            row, pair);
    } else {
      if constexpr (T::kQueryInShared) Fetch(slot);
      Query<T> q(query_.shared());
      query_.Take(lane, q);
      if (end < units_.end) {
        Look(end, slot ^ 1);
        if constexpr (!T::kQueryInShared) Fetch(slot ^ 1);
      }
      Accumulator<T> acc;
      acc.Clear();
      attention.CountQuery(q);
      AttendUnits<T, Ring>(pipeline, attention, stretch, lane, q, acc, let_next_at_);
      Close<T>(acc);
      Leave(acc, {begin, end}, row, pair);
    }
    return end;
  }

  // Writes out what the worker has of a pair, or leaves it as a piece. Items of batch_invariant add
  // up in the piece of the pair's first where the worker has that one, too.
  template <class Sums>
  __device__ __forceinline__ void Leave(Sums&& acc, Range done, const DecodeRow& row,
                                        const Pair& pair) const {
    const int32_t lane = Lane();
    bool has_start = done.first == pair.units.first;
    float* piece;
    if (args_.batch_invariant) {
      const bool follows = T::kFoldsItems && !has_start && units_.first <= pair.units.first;
      piece = ItemPiece<T>(args_, ItemOf(row, pair, follows ? pair.units.first : done.first));
      if constexpr (T::kFoldsItems) {
        if (follows) {
          FoldPiece<T>(piece, lane, acc);
          __syncwarp();  // all have read what WritePiece may replace
        }
      }
      has_start = has_start || follows;
    }
    if (has_start && done.end == pair.units.end) {
      WriteWhole<T>(args_, row, pair, lane, acc);
      return;
    }
    if (!args_.batch_invariant) {
      const bool is_tail = done.end == units_.end;
      piece = is_tail ? reinterpret_cast<float*>(ring_)
                      : HeadPiece<T>(args_, WorkersOfCta<T>(), WorkerOfThread<T>());
      Mark(row, pair, is_tail ? marks_.tail_row : marks_.head_row,
           is_tail ? marks_.tail : marks_.head);
    }
    WritePiece<T>(acc, lane, piece);
    __syncwarp();  // for FoldPiece
  }

  // batch_invariant: the pair's item that begins with a unit.
  __device__ __forceinline__ int32_t ItemOf(const DecodeRow& row, const Pair& pair,
                                            int32_t unit) const {
    const int32_t pair_in_row =
        FloorDiv(pair.units.first - map_.units[pair.row], pair.units.end - pair.units.first);
    return map_.parts[pair.row] + pair_in_row * map_.pair_items[pair.row] +
           FloorDiv(unit - pair.units.first, InvariantItemUnits(row, args_.group, T::kGrain));
  }

  // The head piece left for global memory while the ring was in use. The CTA's warps join it soon,
  // so it comes back, behind the tail; the barrier before that waits for it.
  __device__ __forceinline__ void BringBackHead() const {
    SyncWorker<T>();
    if (marks_.head.units.first < 0 || ring_bytes_ < 2 * T::kPieceBytes) return;
    const auto* from = reinterpret_cast<const uint8_t*>(
        HeadPiece<T>(args_, WorkersOfCta<T>(), WorkerOfThread<T>()));
    constexpr int32_t kThreads = kWarpLanes * T::kWorkerWarps;
    const int32_t thread = threadIdx.x % kThreads;
    for (int32_t i = thread * 16; i < T::kPieceBytes; i += kThreads * 16) {
      CopyAsyncPastL1(ring_ + T::kPieceBytes + i, from + i);
    }
    WaitForCopies();
  }

  const DecodeArgs& args_;
  const WorkMap& map_;
  const Range units_;
  uint8_t* const ring_;  // free again when all units are done
  const int32_t ring_bytes_;
  const QueryStage<T> query_;
  WarpState& state_;
  PieceMarks& marks_;
  const int32_t let_next_at_;  // AttendUnits
  int32_t row_;                // looked at last
};

template <class T, class Ring>
__device__ __forceinline__ void DecodeCta(const DecodeArgs& args, int32_t stages,
                                          bool lets_next_late) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int32_t workers = WorkersOfCta<T>();
  const int32_t worker = WorkerOfThread<T>();
  const SharedLayout layout = LayoutOf<T>(args.rows_count, workers, stages);
  PieceList& list = *reinterpret_cast<PieceList*>(shared + layout.pieces);
  uint8_t* rings = shared + layout.rings;

  if (args.cache == CacheState::kSettled && !lets_next_late) LetNextLaunchStart();
  const WorkMap map = MapWork(args, T::kGrain, reinterpret_cast<int32_t*>(shared + layout.map));
  const CutBy by = CutOf(args, map);
  const int32_t parts = PartsOf(map, by);
  // The slack is of units; an item of batch_invariant is many.
  const int32_t slack = by == CutBy::kItems ? 0 : CtaSlack(workers, T::kGrain);
  const int32_t share = ShareOf(parts, gridDim.x, map.uniform, slack);
  const Range cta_parts = ShareAt({0, parts}, share, blockIdx.x);
  const Range units = UnitsOfWorker<T>(args, map, by, cta_parts, workers, worker);

  if (threadIdx.x == 0) list.cut = {cta_parts, share, map.uniform, by};
  uint8_t* ring = rings + worker * layout.ring_bytes;
  const int32_t row = RowOfAll(map.units, map.rows_count, units.first);
  using PaceKind = typename Worker<T, Ring>::PaceKind;
  typename Worker<T, Ring>::Units pipeline(
      {args, map, row}, units, stages, ring,
      reinterpret_cast<uint64_t*>(shared + layout.full) + worker * stages,
      MakePace<PaceKind>(args.progress, *reinterpret_cast<PaceTerms*>(shared + layout.pace)));
  // The first reader after a writer lets the next launch start only when the writer is done.
  if (args.cache == CacheState::kUnsettled) WaitForPreviousLaunch();
  pipeline.Start(args.cache == CacheState::kBelowQueries || args.tokens != nullptr);
  if constexpr (T::kColumns <= NearRows::kColumnsMax) {
    if (args.tokens != nullptr) AppendTokens<T, Ring>(args, map, units, row);
  }
  pipeline.BringNear(kNearUnits / workers);
  // A warp that holds a unit back still has one under way beside the one in work. Short launches do
  // not wait for a plan. That of items is what as many units would have.
  const bool by_items = by == CutBy::kItems;
  const int32_t paced = by_items ? map.units[map.rows_count] : parts;
  const bool is_paced =
      PaceKind::kIsOn && stages > 2 && paced >= kPacedUnitsMin * static_cast<int32_t>(gridDim.x);
  if (is_paced) {
    pipeline.Keep(PaceFor(paced, by_items ? CeilDiv(paced, gridDim.x) : share, workers,
                          by_items ? 0 : map.uniform));
  }
  Worker<T, Ring> work(
      args, map, units, row, ring, layout.ring_bytes, ring + stages * T::kUnitBytes,
      reinterpret_cast<WarpState*>(shared + layout.states)[threadIdx.x / kWarpLanes],
      list.marks[worker], lets_next_late ? kLastUnits : -1);
  if (is_paced) __syncthreads();  // its terms are there
  WaitForPreviousLaunch();
  if (args.cache != CacheState::kSettled && !lets_next_late) LetNextLaunchStart();
  if (args.tokens != nullptr) {
    Ring::OrderStoresBeforeCopiesOfThem();
    __syncwarp();
  }
  pipeline.Start(false);
  work.Run(pipeline);
  if (is_paced) pipeline.CountTheRest();
  if (args.batch_invariant) {
    JoinItems<T>(args, map, list.cut, workers);
    return;
  }
  Combine<T>(args, map, workers, rings, layout.ring_bytes, list);
}

}  // namespace fp8kvd::kernels::cuda
