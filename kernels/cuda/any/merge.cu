// A warp merges one query column of one row: lanes hold four dimensions each, or several times
// four.
#include "kernels/cuda/any/decode/output.cuh"
#include "kernels/cuda/any/launch.h"
#include "kernels/cuda/any/merge.h"
#include "kernels/cuda/any/ptx.cuh"

namespace fp8kvd::kernels::cuda {
namespace {

constexpr int32_t kWarps = 8;

// A query column's part of a row's pieces.
struct Column {
  const float* first;  // in the first piece
  int64_t piece_floats;
  int32_t items;

  __device__ const float* At(int32_t item) const { return first + item * piece_floats; }
};

// Weight of each item, the lane's of items lane, lane + 32, ...; and the merged terms.
struct ItemWeights {
  static constexpr int32_t kRounds = kInvariantItemsMax / kWarpLanes;
  float of_lane[kRounds];
  float max;
  float sum;
};

__device__ __forceinline__ ItemWeights WeighItems(const Column& column, int32_t head_dim,
                                                  int32_t lane) {
  ItemWeights weights;
  float2 terms[ItemWeights::kRounds];
  weights.max = kEmptyMax;
#pragma unroll
  for (int32_t r = 0; r < ItemWeights::kRounds; ++r) {
    const int32_t item = r * kWarpLanes + lane;
    terms[r] = {kEmptyMax, 0.0F};
    if (item < column.items) {
      terms[r] = *reinterpret_cast<const float2*>(column.At(item) + head_dim);
    }
    weights.max = fmaxf(weights.max, terms[r].x);
  }
#pragma unroll
  for (int32_t step = 1; step < kWarpLanes; step *= 2) {
    weights.max = fmaxf(weights.max, __shfl_xor_sync(kAllLanes, weights.max, step));
  }
  weights.sum = 0.0F;
#pragma unroll
  for (int32_t r = 0; r < ItemWeights::kRounds; ++r) {
    weights.of_lane[r] = Exp2(terms[r].x - weights.max);
    weights.sum = fmaf(weights.of_lane[r], terms[r].y, weights.sum);
  }
#pragma unroll
  for (int32_t step = 1; step < kWarpLanes; step *= 2) {
    weights.sum += __shfl_xor_sync(kAllLanes, weights.sum, step);
  }
  return weights;
}

__device__ void MergeColumn(const DecodeRow& row, const DecodeArgs& args, const Column& column,
                            const ColumnPlace& place, int32_t head_dim, float back) {
  const int32_t lane = threadIdx.x % kWarpLanes;
  const ItemWeights weights = WeighItems(column, head_dim, lane);
  const Finish finish = FinishColumn(row, place.q_head, weights.max, weights.sum, back);
  for (int32_t first = 0; first < head_dim; first += 4 * kWarpLanes) {
    const int32_t dim = first + 4 * lane;
    const bool there = dim < head_dim;
    float4 o = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll
    for (int32_t r = 0; r < ItemWeights::kRounds; ++r) {
      const int32_t count = min(column.items - r * kWarpLanes, kWarpLanes);
#pragma unroll 8
      for (int32_t i = 0; i < count; ++i) {
        const float weight = __shfl_sync(kAllLanes, weights.of_lane[r], i);
        float4 x = {0.0F, 0.0F, 0.0F, 0.0F};
        if (there) x = *reinterpret_cast<const float4*>(column.At(r * kWarpLanes + i) + dim);
        o = {fmaf(weight, x.x, o.x), fmaf(weight, x.y, o.y), fmaf(weight, x.z, o.z),
             fmaf(weight, x.w, o.w)};
      }
    }
    if (!there) continue;
    const float y[4] = {o.x * finish.factor, o.y * finish.factor, o.z * finish.factor,
                        o.w * finish.factor};
    StoreOut(row, args.out_type, place.index * head_dim + dim, y);
  }
  if (lane == 0 && row.lse != nullptr) row.lse[place.index] = finish.lse;
}

__global__ void __launch_bounds__(kWarps* kWarpLanes)
    MergeKernel(const __grid_constant__ DecodeArgs args, int32_t head_dim, Grain grain,
                float back) {
  LetNextLaunchStart();
  const DecodeRow& row = args.rows[blockIdx.y];
  const int32_t items = InvariantItems(row, args.group, grain);
  WaitForPreviousLaunch();
  const int32_t columns = row.q_len * args.group;  // of a KV head
  const int32_t at = blockIdx.x * kWarps + threadIdx.x / kWarpLanes;
  const int32_t kv_head = FloorDiv(at, columns);
  if (items == 1 || kv_head >= row.kv_heads) return;
  const int32_t column = at - kv_head * columns;
  const int32_t block = FloorDiv(column, grain.columns);
  const int32_t pair_in_row = kv_head * ColumnBlocks(row, args.group, grain.columns) + block;
  const int64_t piece_floats = PieceFloats(grain.columns, head_dim);
  const int64_t item = args.row_items[blockIdx.y] + static_cast<int64_t>(pair_in_row) * items;
  const float* first =
      args.pieces + item * piece_floats + (column - block * grain.columns) * (head_dim + 4);
  Pair pair{};
  pair.kv_head = kv_head;
  MergeColumn(row, args, {first, piece_floats, items}, PlaceOf(row, pair, args, column), head_dim,
              back);
}

}  // namespace

cudaError_t LaunchMerge(const DecodeArgs& args, Precision precision, int32_t head_dim, Grain grain,
                        int32_t columns_max, cudaStream_t stream) {
  const float back = precision == Precision::kFp8Kv ? kBackFactor<Precision::kFp8Kv> : 1.0F;
  return LaunchAfterPrevious(MergeKernel, dim3(CeilDiv(columns_max, kWarps), args.rows_count),
                             dim3(kWarps * kWarpLanes), 0, stream, args, head_dim, grain, back);
}

}  // namespace fp8kvd::kernels::cuda
