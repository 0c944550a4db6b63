// kernels/cuda/sm90/step/step.cuh: the step kernel. What sm90/decode/pairs.cuh
// does, and before it: each cluster fetches its pair's query over the bus, and the warp that has
// the pair's last unit quantises the new token and puts it there and into its page.
//
// Grid: x a cluster for each KV head, y the rows. Shared memory: StepLayout. Bytes over the bus:
// query, token and result once each. Two CTAs must not read the same bytes over it: such reads come
// back one after the other, a microsecond each.
#pragma once

#include <cstdint>

#include "kernels/cuda/any/append_token.cuh"
#include "kernels/cuda/any/near_and_done.cuh"
#include "kernels/cuda/sm90/decode/pairs.cuh"
#include "kernels/cuda/sm90/decode/ring.cuh"
#include "kernels/cuda/sm90/step/step.h"

namespace fp8kvd::kernels::cuda {

// Dynamic shared memory of a CTA, in bytes.
struct StepLayout {
  PairsLayout pairs;     // rings without room for queries
  int32_t tensors;       // HostTensors
  int32_t tensors_full;  // their barrier
  int32_t total;
};

template <class T>
__host__ __device__ constexpr StepLayout StepLayoutOf(int32_t warps, int32_t stages,
                                                      int32_t cluster) {
  static_assert(T::kUnitBytes >= T::kPieceBytes, "a piece replaces a unit");
  StepLayout layout{};
  const int32_t entries = InboxEntries<T>(cluster);
  layout.pairs.full = 0;
  layout.pairs.inbox_full = warps * stages * 8;
  layout.tensors_full = layout.pairs.inbox_full + 8;
  layout.tensors = (layout.tensors_full + 8 + 127) / 128 * 128;
  layout.pairs.inbox = layout.tensors + (T::kColumns + 2) * T::kHeadDim * 2;
  layout.pairs.inbox_terms = layout.pairs.inbox + entries * 16;
  layout.pairs.rings = (layout.pairs.inbox_terms + entries * 8 + 127) / 128 * 128;
  layout.pairs.ring_bytes = stages * T::kUnitBytes;
  layout.pairs.total = layout.total = layout.pairs.rings + warps * layout.pairs.ring_bytes;
  return layout;
}

// A pair's query and new token on their way from the host to the CTA's shared memory.
template <class T>
class HostTensors {
 public:
  __device__ __forceinline__ HostTensors(uint8_t* shared, uint64_t* full)
      : shared_(shared), full_(full) {}

  // One thread of each CTA calls MakeBarrier, then Expect, and FetchToken where it said so. Once
  // all CTAs of the cluster have made theirs, one of them calls FetchQuery for all.
  __device__ __forceinline__ void MakeBarrier() const { BulkRing::Init(full_); }
  __device__ __forceinline__ void Expect(const Pair& pair, bool with_token) const {
    BulkRing::Expect((pair.columns + (with_token ? 2 : 0)) * kRowBytes, full_);
  }
  __device__ __forceinline__ void FetchToken(const StepRow& row, const Pair& pair) const {
    const int64_t element = int64_t{pair.kv_head} * T::kHeadDim;
    BulkRing::Bring(Token(), row.k + element, kRowBytes, full_);
    BulkRing::Bring(Token() + T::kHeadDim, row.v + element, kRowBytes, full_);
  }
  __device__ __forceinline__ void FetchQuery(const StepRow& row, const Pair& pair,
                                             int32_t cluster) const {
    const uint16_t* from = row.decode.q + int64_t{pair.kv_head} * pair.columns * T::kHeadDim;
    if (cluster == 1) {
      BulkRing::Bring(shared_, from, pair.columns * kRowBytes, full_);
    } else {
      BulkRing::BringToCluster(shared_, from, pair.columns * kRowBytes, full_, cluster);
    }
  }

  // Until all is there. Every CTA waits, since what comes must find it there.
  __device__ __forceinline__ void Wait() const { BulkRing::Wait(full_, 0); }

  // Stores the token in a unit, in shared or global memory. All lanes of a warp call it.
  __device__ __forceinline__ void StoreToken(int32_t pos, int32_t lane, uint8_t* unit) const {
    const EncodedToken<T::kPrecision, T::kHeadDim> token(Token(), Token() + T::kHeadDim, lane);
    const int32_t tile = pos % T::kUnitTokens / kTileTokens;
    token.Store(unit + tile * T::kTileBytes, pos % kTileTokens, lane);
  }

  // Lane (g, t) takes, of column g, the dimensions that page_layout.h gives to t of K.
  __device__ __forceinline__ void TakeQuery(const Pair& pair, int32_t lane, Query<T>& q) const {
    const uint8_t* column = shared_ + lane / 4 * kRowBytes;
    const bool there = lane / 4 < pair.columns;
#pragma unroll
    for (int32_t c = 0; c < (T::kDimTiles + 1) / 2; ++c) {
      const uint8_t* chunk = column + c * kChunkDims * 2;
      uint4 x{};
      if (there && c < T::kChunks) {
        x = *reinterpret_cast<const uint4*>(chunk + lane % 4 * 16);
      } else if (there) {
        const uint2 half = *reinterpret_cast<const uint2*>(chunk + lane % 4 * 8);
        x = {half.x, half.y, 0U, 0U};
      }
      q.Set(0, c, x);
    }
    MakeOperand<T>(q);
  }

 private:
  static constexpr int32_t kRowBytes = T::kHeadDim * 2;

  __device__ __forceinline__ uint16_t* Token() const {
    return reinterpret_cast<uint16_t*>(shared_ + T::kColumns * kRowBytes);
  }

  uint8_t* const shared_;  // [columns][head_dim], then k, then v
  uint64_t* const full_;
};

// The pair of a row's KV head; its units are counted from its first.
template <class T>
__device__ __forceinline__ Pair PairOfHead(const DecodeRow& row, int32_t kv_head, int32_t group) {
  const RowWork work = WorkOf<T>(row, group);
  return {0, kv_head, 0, group, {0, work.units}, work.first_unit};
}

// value / 2^shift, rounded up.
__device__ __forceinline__ int32_t CeilShift(int32_t value, int32_t shift) {
  return (value + (1 << shift) - 1) >> shift;
}

// The first thing that a CTA does: makes the barriers that others of its cluster write to, and
// tells them. What follows may take its time while they do the same.
template <class T>
__device__ __forceinline__ void MakeBarriers(const HostTensors<T>& tensors, int32_t cluster,
                                             uint64_t* inbox_full) {
  if (threadIdx.x == 0) {
    tensors.MakeBarrier();
    if (cluster > 1) BulkRing::Init(inbox_full);
    BulkRing::FenceInit();
  }
  __syncwarp();
  if (cluster > 1) ArriveAtCluster();
}

// Has the pair's tensors fetched: warp 0 does it, the query as soon as all CTAs of the cluster have
// their barriers. It has waited for the cluster then, and other warps have not.
template <class T>
__device__ __forceinline__ void FetchPair(const StepRow& row, const Pair& pair, bool with_token,
                                          int32_t cluster, const HostTensors<T>& tensors) {
  if (threadIdx.x >= kWarpLanes) return;
  if (threadIdx.x == 0) {
    tensors.Expect(pair, with_token);
    if (cluster == 1) tensors.FetchQuery(row, pair, 1);
    if (with_token) tensors.FetchToken(row, pair);
  }
  __syncwarp();
  if (cluster == 1) return;
  WaitForCluster();
  if (threadIdx.x == 0 && ClusterRank() == 0) tensors.FetchQuery(row, pair, cluster);
  __syncwarp();
}

// Leaves the warp's piece of the pair in its ring.
template <class T, class Pipeline>
__device__ __forceinline__ void AttendStretch(const DecodeArgs& args, const DecodeRow& row,
                                              const Pair& pair, const Stretch& stretch,
                                              const HostTensors<T>& tensors, Pipeline& pipeline,
                                              int32_t lane, uint8_t* ring) {
  Query<T> q(nullptr);
  tensors.TakeQuery(pair, lane, q);
  Attention<T> attention = {row, args.group_inverse, pair.column_first};
  attention.CountQuery(q);
  Accumulator<T> acc;
  acc.Clear();
  AttendUnits<T, BulkRing>(pipeline, attention, stretch, lane, q, acc, /*let_next_at=*/-1);
  Close<T>(acc);
  __syncwarp();  // the ring is free
  WritePiece<T>(acc, lane, reinterpret_cast<float*>(ring));
}

// warps and CTAs of a cluster are powers of two.
template <class T>
__device__ __forceinline__ void DecodeStep(const StepArgs& step, const StepRow& row,
                                           int32_t stages) {
  extern __shared__ __align__(128) uint8_t shared[];
  const DecodeArgs& args = step.decode;
  const int32_t lane = threadIdx.x % kWarpLanes;
  const int32_t warp_bits = 31 - __clz(blockDim.x / kWarpLanes);
  const int32_t warps = 1 << warp_bits;
  const int32_t warp = threadIdx.x / kWarpLanes;
  const int32_t cluster = ClusterCtas();
  const int32_t cluster_bits = 31 - __clz(cluster);
  const StepLayout layout = StepLayoutOf<T>(warps, stages, cluster);
  uint8_t* ring = shared + layout.pairs.rings + warp * layout.pairs.ring_bytes;
  uint64_t* full = reinterpret_cast<uint64_t*>(shared + layout.pairs.full) + warp * stages;
  const HostTensors<T> tensors(shared + layout.tensors,
                               reinterpret_cast<uint64_t*>(shared + layout.tensors_full));
  MakeBarriers(tensors, cluster, reinterpret_cast<uint64_t*>(shared + layout.pairs.inbox_full));
  if (step.is_later_part) LetNextLaunchStart();
  const Pair pair = PairOfHead<T>(row.decode, ClusterIndex(), args.group);
  const int32_t units = pair.units.end;
  const Range of_cta = ShareAt({0, units}, CeilShift(units, cluster_bits), ClusterRank());
  const int32_t cta_units = of_cta.end - of_cta.first;
  const bool with_token = row.k != nullptr && cta_units > 0 && of_cta.end == units;
  FetchPair<T>(row, pair, with_token, cluster, tensors);
  const int32_t mine = CeilShift(max(cta_units - warp, 0), warp_bits);
  const int32_t first = pair.first_unit + of_cta.first + warp;
  const PairSource<T> source = {row.decode, pair.kv_head, first, warps};
  Pipeline<T, BulkRing, PairSource<T>> pipeline(source, {0, mine}, stages, ring, full);
  if (args.cache == CacheState::kUnsettled) WaitForPreviousLaunch();
  pipeline.Start(args.cache == CacheState::kBelowQueries);
  if (cluster == 1) {
    __syncthreads();  // all see the tensors' barrier
  } else if (warp != 0) {
    WaitForCluster();
  }
  if (!step.is_later_part) {
    WaitForPreviousLaunch();
    LetNextLaunchStart();
  }
  const int32_t last = of_cta.first + warp + (mine - 1) * warps;
  const bool appends = row.k != nullptr && mine > 0 && last == units - 1;
  auto* const page = const_cast<uint8_t*>(appends ? source.At(mine - 1).from : nullptr);
  tensors.Wait();
  if (appends && mine > stages) {  // the unit will be copied with the token in it
    tensors.StoreToken(row.decode.pos, lane, page);
    BulkRing::OrderStoresBeforeCopiesOfThem();
    __syncwarp();
  }
  pipeline.Start(false);
  if (appends && mine <= stages) {
    BulkRing::Wait(full + mine - 1, 0);
    tensors.StoreToken(row.decode.pos, lane, ring + (mine - 1) * T::kUnitBytes);
    __syncwarp();
  }
  if (mine > 0) {
    const Stretch stretch = {first * T::kUnitTokens, warps * T::kUnitTokens, mine};
    AttendStretch<T>(args, row.decode, pair, stretch, tensors, pipeline, lane, ring);
  }
  JoinPair<T>(args, row.decode, pair, min(cta_units, warps), shared, layout.pairs);
  // Here, since the join's barriers would wait for these stores.
  if (appends && mine <= stages) tensors.StoreToken(row.decode.pos, lane, page);
}

}  // namespace fp8kvd::kernels::cuda

namespace fp8kvd::kernels::cuda::sm90 {

template <class T, int32_t kRows>
__global__ void __launch_bounds__(T::kWarpsMax* kWarpLanes, T::kPairCtas)
    StepKernel(const __grid_constant__ StepArgs args,
               const __grid_constant__ NearStepRows<kRows> rows, int32_t stages) {
  DecodeStep<T>(args, rows.At(blockIdx.y), stages);  // a row in the constant bank
  WaitForPreviousLaunch();  // the next launch counts on it, and so does the mark
  DoneMark done = args.decode.done;
  done.value = args.done_value;
  SignalDone(done);
}

template <Precision precision, int32_t head_dim>
int32_t Step<precision, head_dim>::Shared(const LaunchShape& shape) {
  using T = PairsTraits<precision, head_dim, kStepColumnsMax>;
  return StepLayoutOf<T>(shape.warps, shape.stages, shape.cluster).total;
}

template <Precision precision, int32_t head_dim>
const void* Step<precision, head_dim>::Kernel(int32_t rows) {
  using T = PairsTraits<precision, head_dim, kStepColumnsMax>;
  constexpr int32_t kOne = kStepRowsOf[0];
  constexpr int32_t kFew = kStepRowsOf[1];
  if (rows <= kOne) return reinterpret_cast<const void*>(StepKernel<T, kOne>);
  if (rows <= kFew) return reinterpret_cast<const void*>(StepKernel<T, kFew>);
  return reinterpret_cast<const void*>(StepKernel<T, kStepRowsMax>);
}

}  // namespace fp8kvd::kernels::cuda::sm90
