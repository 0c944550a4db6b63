#include "kernels/cuda/launch_shape.h"

#include <algorithm>

namespace fp8kvd::kernels::cuda {
namespace {

// One CTA to a multiprocessor, of up to so many warps, each with a ring of so many units: what was
// fastest on an H200 (docs/performance.md). More warps would not fit with their rings, fewer do not
// keep up with the memory unless each has a whole pair to itself.
constexpr int32_t kWarps = 8;
constexpr int32_t kStagesOfManyWarps = 3;
constexpr int32_t kStagesOfFewWarps = 4;
constexpr int32_t kShortUnits = 4;        // of a warp
constexpr int32_t kSharedReserve = 1024;  // that the system takes of each CTA

}  // namespace

LaunchWork WorkOfRows(std::span<const DecodeRow> rows, int32_t group, Grain grain,
                      bool batch_invariant) {
  LaunchWork work{};
  for (const DecodeRow& row : rows) {
    const RowWork of_row = WorkOf(row, group, grain);
    const int64_t items = batch_invariant ? InvariantItems(row, group, grain) : of_row.units;
    work.units += int64_t{of_row.units} * of_row.pairs;
    work.items += items * of_row.pairs;
    work.pairs += of_row.pairs;
    work.items_max = std::max(work.items_max, static_cast<int32_t>(items));
  }
  return work;
}

LaunchShape ShapeFor(const DecodeKernel& kernel, const DeviceLimits& device, int32_t rows_count,
                     const LaunchWork& work) {
  LaunchShape shape{};
  // Short work: no more CTAs than give each warp a unit or each pair a CTA of its own.
  const int64_t useful = std::max(work.items / kWarps, work.pairs);
  shape.ctas = static_cast<int32_t>(std::clamp<int64_t>(useful, 1, device.multiprocessors));
  // Equal pairs of which a CTA gets a handful go best with a warp each: nothing is left to join.
  // Not where a unit takes more arithmetic for its bytes, which fewer warps cannot keep up with.
  const bool uniform = work.pairs * work.items_max == work.items;
  const bool is_light =
      kernel.grain.columns == 8 && (kernel.precision == Precision::kBf16 || kernel.head_dim == 128);
  const auto pairs_of_cta = static_cast<int32_t>((work.pairs + shape.ctas - 1) / shape.ctas);
  const bool handful = uniform && is_light && pairs_of_cta >= kWarps / 2 && pairs_of_cta <= kWarps;
  shape.warps = std::min(handful ? pairs_of_cta : kWarps, kernel.warps_max);

  const int32_t pair_items = uniform ? work.items_max : 0;
  const int32_t of_cta = ShareOf(static_cast<int32_t>(work.items), shape.ctas, pair_items,
                                 CtaSlack(shape.warps, kernel.grain));
  const int32_t of_warp = ShareOf(of_cta, shape.warps, pair_items, 0);
  // A ring that holds half of a multiprocessor's memory or less lets the next launch's CTA start
  // beside this one's, which is worth more than its depth where there is little to read.
  const bool is_short = of_warp <= kShortUnits;
  const int32_t shared_max =
      is_short ? device.shared_per_multiprocessor / 2 - kSharedReserve : device.shared_per_cta;
  const auto fits = [&](int32_t bytes) { return kernel.shared_bytes(rows_count, shape) <= bytes; };
  shape.stages = shape.warps > kWarps / 2 ? kStagesOfManyWarps : kStagesOfFewWarps;
  shape.stages = std::min(shape.stages, of_warp);
  while (!fits(shared_max) && shape.stages > 2) --shape.stages;
  while (!fits(device.shared_per_cta) && shape.stages > 1) --shape.stages;
  while (!fits(device.shared_per_cta) && shape.warps > 1) --shape.warps;
  return shape;
}

int64_t ShapePiecesMax(const DeviceLimits& device) {
  return PiecesNeeded({device.multiprocessors, kWarps, 1});
}

int32_t ShapeCtasMax(const DeviceLimits& device) { return device.multiprocessors; }

}  // namespace fp8kvd::kernels::cuda
