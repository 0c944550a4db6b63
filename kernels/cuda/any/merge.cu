// A CTA merges one query column of one row and KV head: its threads are split into as many parts as
// take head_dim in fours; each part sums every so many-th piece, and the parts are summed in order.
#include "kernels/cuda/any/decode/output.cuh"
#include "kernels/cuda/any/launch.h"
#include "kernels/cuda/any/merge.h"
#include "kernels/cuda/any/ptx.cuh"

namespace fp8kvd::kernels::cuda {
namespace {

constexpr int32_t kThreads = 256;
static_assert(kInvariantItemsMax <= kThreads, "each piece has a thread");

// A column of a row's pieces.
struct Column {
  const float* first;  // of its first piece
  int64_t piece_floats;
  int32_t items;
};

// Largest value over the CTA.
__device__ float MaxOfThreads(float mine, float* shared) {
#pragma unroll
  for (int32_t step = 1; step < kWarpLanes; step *= 2) {
    mine = fmaxf(mine, __shfl_xor_sync(kAllLanes, mine, step));
  }
  if (threadIdx.x % kWarpLanes == 0) shared[threadIdx.x / kWarpLanes] = mine;
  __syncthreads();
  float all = shared[0];
  for (int32_t w = 1; w < kThreads / kWarpLanes; ++w) all = fmaxf(all, shared[w]);
  return all;
}

__device__ void MergeColumn(const DecodeRow& row, const DecodeArgs& args, const Column& column,
                            const ColumnPlace& place, int32_t head_dim, float back) {
  __shared__ float maxima[kThreads / kWarpLanes];
  __shared__ float weights[kThreads];
  __shared__ float4 sums[kThreads];
  const int32_t i = threadIdx.x;
  float2 terms = {kEmptyMax, 0.0F};
  if (i < column.items) {
    terms = *reinterpret_cast<const float2*>(column.first + i * column.piece_floats + head_dim);
  }
  const float max = MaxOfThreads(terms.x, maxima);
  weights[i] = Exp2(terms.x - max);
  const int32_t fours = head_dim / 4;
  const int32_t parts = kThreads / fours;
  const int32_t part = i / fours;
  const int32_t dim = i % fours * 4;
  sums[i].x = weights[i] * terms.y;  // of the denominator first
  __syncthreads();
  float sum = 0.0F;
  for (int32_t j = 0; j < column.items; ++j) sum += sums[j].x;
  __syncthreads();

  float4 o = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll 4
  for (int32_t j = part; part < parts && j < column.items; j += parts) {
    const float4 x = *reinterpret_cast<const float4*>(column.first + j * column.piece_floats + dim);
    o.x = fmaf(weights[j], x.x, o.x);
    o.y = fmaf(weights[j], x.y, o.y);
    o.z = fmaf(weights[j], x.z, o.z);
    o.w = fmaf(weights[j], x.w, o.w);
  }
  sums[i] = o;
  __syncthreads();
  if (part != 0) return;
  for (int32_t p = 1; p < parts; ++p) {
    const float4 x = sums[p * fours + i];
    o = {o.x + x.x, o.y + x.y, o.z + x.z, o.w + x.w};
  }
  const Finish finish = FinishColumn(row, place.q_head, max, sum, back);
  const float y[4] = {o.x * finish.factor, o.y * finish.factor, o.z * finish.factor,
                      o.w * finish.factor};
  StoreOut(row, args.out_type, place.index * head_dim + dim, y);
  if (i == 0 && row.lse != nullptr) row.lse[place.index] = finish.lse;
}

__global__ void __launch_bounds__(kThreads) MergeKernel(const __grid_constant__ DecodeArgs args,
                                                        int32_t head_dim, Grain grain, float back) {
  LetNextLaunchStart();
  WaitForPreviousLaunch();
  const DecodeRow& row = args.rows[blockIdx.y];
  const int32_t items = InvariantItems(row, args.group, grain);
  const int32_t columns = row.q_len * args.group;  // of a KV head
  const int32_t kv_head = blockIdx.x / columns;
  if (items == 1 || kv_head >= row.kv_heads) return;
  const int32_t column = blockIdx.x % columns;
  const int32_t block = column / grain.columns;
  const int32_t pair_in_row = kv_head * ColumnBlocks(row, args.group, grain.columns) + block;
  const int64_t piece_floats = PieceFloats(grain.columns, head_dim);
  const int64_t item = args.row_items[blockIdx.y] + static_cast<int64_t>(pair_in_row) * items;
  const float* first = args.pieces + item * piece_floats + column % grain.columns * (head_dim + 4);
  Pair pair{};
  pair.kv_head = kv_head;
  const ColumnPlace place = PlaceOf(row, pair, args, column);
  MergeColumn(row, args, {first, piece_floats, items}, place, head_dim, back);
}

}  // namespace

cudaError_t LaunchMerge(const DecodeArgs& args, Precision precision, int32_t head_dim, Grain grain,
                        int32_t columns_max, cudaStream_t stream) {
  const float back = precision == Precision::kFp8Kv ? kBackFactor<Precision::kFp8Kv> : 1.0F;
  return LaunchAfterPrevious(MergeKernel, dim3(columns_max, args.rows_count), dim3(kThreads), 0,
                             stream, args, head_dim, grain, back);
}

}  // namespace fp8kvd::kernels::cuda
