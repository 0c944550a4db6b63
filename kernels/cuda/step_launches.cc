#include "kernels/cuda/step_launches.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "kernels/cuda/any/launch.h"
#include "kernels/cuda/any/warp.h"
#include "kernels/cuda/decode_table.h"
#include "kernels/cuda/step_shape.h"

namespace fp8kvd::kernels::cuda {
namespace {

cudaError_t LaunchAfterPrevious(const KernelLaunch& launch, cudaStream_t stream) {
  const AfterPrevious after(launch.grid, dim3(launch.threads), launch.cluster, launch.shared_bytes,
                            stream);
  return cudaLaunchKernelExC(after.config(), launch.kernel, launch.params);
}

}  // namespace

void StepLaunches::Init(int32_t sm, const DeviceLimits& limits, cudaStream_t stream) {
  sm_ = sm;
  limits_ = limits;
  stream_ = stream;
}

absl::Status StepLaunches::Prepare(absl::Span<const KernelShape> shapes, int64_t* allocations) {
  for (const KernelShape& shape : shapes) {
    const DecodeKernel* kernel = FindDecodeKernel(sm_, shape.precision, shape.head_dim, 1);
    if (kernel == nullptr || kernel->step.kernel == nullptr) continue;
    const bool is_known = std::any_of(prepared_.begin(), prepared_.end(),
                                      [&](const auto& one) { return one->kernel == kernel; });
    if (is_known) continue;
    if (absl::Status status = PrepareKernel(*kernel, allocations); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status StepLaunches::PrepareKernel(const DecodeKernel& kernel, int64_t* allocations) {
  for (const int32_t rows : kStepRowsOf) {
    const absl::Status status = ToStatus(
        cudaFuncSetAttribute(kernel.step.kernel(rows), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             limits_.shared_per_cta),
        "loading a step kernel");
    if (!status.ok()) return status;
  }
  auto prepared = std::make_unique<Prepared>();
  prepared->kernel = &kernel;
  StepArgs args{};
  int32_t stages = 0;
  void* params[] = {&args, &near_, &stages};
  for (int32_t rows = 1; rows <= kGraphRowsMax; ++rows) {
    for (int32_t i = 0; i < kClusters; ++i) {
      const int32_t cluster = 1 << i;
      const KernelLaunch launch = {
          kernel.step.kernel(rows), dim3(cluster), kWarpLanes, cluster, 0, params};
      const absl::Status status =
          ToStatus(prepared->graphs[rows - 1][i].Init(launch, stream_), "making a graph of a step");
      if (!status.ok()) return status;
    }
  }
  prepared_.push_back(std::move(prepared));
  ++*allocations;
  return absl::OkStatus();
}

StepLaunches::Prepared* StepLaunches::Find(const DecodeParams& params) {
  const DecodeKernel* kernel =
      FindDecodeKernel(sm_, params.precision, params.head_dim, params.group);
  for (const auto& prepared : prepared_) {
    if (prepared->kernel == kernel) return prepared.get();
  }
  return nullptr;
}

absl::Status StepLaunches::Launch(Prepared& prepared, absl::Span<const DecodeRow> rows,
                                  absl::Span<const AppendRow>& appends, const LaunchShape& shape,
                                  const StepArgs& args, bool as_graph) {
  const StepFunctions& step = prepared.kernel->step;
  StepRow* to = near_.rows;
  for (const DecodeRow& row : rows) {
    const NewToken token = TakeToken(row, appends);
    *to++ = {row, token.k, token.v};
  }
  const auto count = static_cast<int32_t>(rows.size());
  NearStepRows<1> alone(near_.rows[0]);
  int32_t stages = shape.stages;
  void* params[] = {const_cast<StepArgs*>(&args), &near_, &stages};
  if (count == 1) params[1] = &alone;
  const KernelLaunch launch = {
      step.kernel(count),       dim3(shape.row_pairs * shape.cluster, count),
      shape.warps * kWarpLanes, shape.cluster,
      step.shared_bytes(shape), params};
  if (!as_graph) return ToStatus(LaunchAfterPrevious(launch, stream_), "a step");
  const auto cluster = static_cast<uint32_t>(shape.cluster);
  KernelGraph& graph = prepared.graphs[count - 1][std::countr_zero(cluster)];
  return ToStatus(graph.Launch(launch, stream_), "a step as a graph");
}

absl::StatusOr<bool> StepLaunches::Run(absl::Span<const DecodeRow> rows,
                                       const DecodeParams& params) {
  const absl::Span<const AppendRow> appends = inputs_->Kept();
  Prepared* const prepared = Find(params);
  if (prepared == nullptr || params.batch_invariant || !inputs_->KeptAreTokensOf(rows)) {
    return false;
  }
  const DecodeKernel& kernel = *prepared->kernel;
  const Grain grain = {kernel.step.unit_tokens, kernel.grain.columns};
  const LaunchWork work = WorkOfRows(rows, params.group, grain, /*batch_invariant=*/false);
  LaunchShape shape{};
  if (!StepShapeFor(kernel, limits_, work, shape)) return false;
  const bool as_graph = rows.size() <= kGraphRowsMax && fences_->AllPassed();
  StepArgs args{};
  args.decode.group = params.group;
  args.decode.group_inverse = GroupInverse(params.group);
  args.decode.out_type = params.out_type;
  args.decode.cache = as_graph ? CacheState::kSettled : writes_->StateFor(rows);
  absl::Span<const AppendRow> left = appends;
  while (!rows.empty()) {
    const auto some = rows.subspan(0, kStepRowsMax);
    rows.remove_prefix(some.size());
    const auto count = static_cast<int32_t>(some.size());
    if (rows.empty()) {
      args.decode.done = fences_->NextMark(count * shape.row_pairs * shape.cluster);
      args.done_value = std::exchange(args.decode.done.value, 0);
    }
    args.decode.rows_count = count;
    const absl::Status status = Launch(*prepared, some, left, shape, args, as_graph);
    if (!status.ok()) return status;
    args.is_later_part = true;
    args.decode.cache = CacheState::kSettled;
  }
  writes_->Decode();
  writes_->Append(appends);
  inputs_->TakeKept();
  fences_->SetMarked(args.decode.done.flags != nullptr);
  return true;
}

}  // namespace fp8kvd::kernels::cuda
