#include "kernels/cuda/step_launches.h"

#include <algorithm>

#include "config/base/limits.h"
#include "kernels/cuda/decode_table.h"
#include "kernels/cuda/step_shape.h"

namespace fp8kvd::kernels::cuda {
namespace {

// Whether rows are of one query token, each append is the token of one of them, in their order, and
// no other row may see it.
bool IsStep(absl::Span<const DecodeRow> rows, absl::Span<const AppendRow> appends,
            std::vector<std::pair<const int32_t*, const uint8_t*>>& places) {
  size_t appended = 0;
  places.clear();
  for (const DecodeRow& row : rows) {
    if (row.q_len != 1) return false;
    if (appended < appends.size() && IsOf(appends[appended], row)) ++appended;
    places.emplace_back(row.block_table, row.base);
  }
  if (appended < appends.size()) return false;
  if (appended == 0) return true;
  std::sort(places.begin(), places.end());
  return std::adjacent_find(places.begin(), places.end()) == places.end();
}

// Rows with their appends, which are taken from the front.
NearStepRows Near(absl::Span<const DecodeRow> rows, absl::Span<const AppendRow>& appends) {
  NearStepRows near;
  StepRow* to = near.rows;
  for (const DecodeRow& row : rows) {
    const bool appends_too = !appends.empty() && IsOf(appends.front(), row);
    *to++ = {row, appends_too ? appends.front().k : nullptr,
             appends_too ? appends.front().v : nullptr};
    if (appends_too) appends.remove_prefix(1);
  }
  return near;
}

}  // namespace

void StepLaunches::Init(int32_t sm, const DeviceLimits& limits, cudaStream_t stream) {
  sm_ = sm;
  limits_ = limits;
  stream_ = stream;
  places_.reserve(kItemsMax);
}

absl::StatusOr<bool> StepLaunches::Run(absl::Span<const DecodeRow> rows,
                                       const DecodeParams& params) {
  const absl::Span<const AppendRow> appends = inputs_->Kept();
  const DecodeKernel* kernel =
      FindDecodeKernel(sm_, params.precision, params.head_dim, params.group);
  if (kernel == nullptr || kernel->step.launch == nullptr || params.batch_invariant ||
      !IsStep(rows, appends, places_)) {
    return false;
  }
  const Grain grain = {kernel->step.unit_tokens, kernel->grain.columns};
  const LaunchWork work = WorkOfRows(rows, params.group, grain, /*batch_invariant=*/false);
  LaunchShape shape{};
  if (!StepShapeFor(*kernel, limits_, work, shape)) return false;
  StepArgs args{};
  args.decode.group = params.group;
  args.decode.group_inverse = GroupInverse(params.group);
  args.decode.out_type = params.out_type;
  args.decode.cache = writes_->StateFor(rows);
  absl::Span<const AppendRow> left = appends;
  while (!rows.empty()) {
    const auto some = rows.subspan(0, NearStepRows::kMax);
    rows.remove_prefix(some.size());
    if (rows.empty()) args.decode.done = fences_->NextMark();
    args.decode.rows_count = static_cast<int32_t>(some.size());
    const absl::Status status =
        ToStatus(kernel->step.launch(args, Near(some, left), shape, stream_), "a step");
    if (!status.ok()) return status;
    args.is_later_part = true;
    args.decode.cache = CacheState::kSettled;
  }
  writes_->Decode();
  writes_->Append(appends);
  inputs_->TakeKept();
  fences_->SetMarked(args.decode.done.flag != nullptr);
  return true;
}

}  // namespace fp8kvd::kernels::cuda
