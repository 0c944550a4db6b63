#include "kernels/cuda/step_shape.h"

#include <algorithm>

namespace fp8kvd::kernels::cuda {
namespace {

// What was fastest on an H200 (docs/performance.md). Powers of two where the kernel says so.
constexpr int32_t kWarps = 8;
constexpr int32_t kStagesMax = 6;
constexpr int32_t kCtasMax = 2;     // of a multiprocessor: one's bytes cross while another works
constexpr int32_t kClusterMax = 8;  // larger than 2: on half of the multiprocessors, or not all fit
constexpr int32_t kTokensOfCta = 256;  // below, another CTA for a pair does not pay
// Tokens of a warp beyond which an even cut of all units is faster: of pairs of unlike lengths; of
// others, which leave multiprocessors idle, or do not.
constexpr int32_t kUnevenTokensMax = 256;
constexpr int32_t kFewTokensMax = 512;
constexpr int32_t kTokensMax = 1024;

int32_t ClusterOf(const DeviceLimits& device, int64_t pairs, int32_t tokens) {
  int32_t cluster = 1;
  for (int32_t twice = 2; twice <= kClusterMax; twice *= 2) {
    const int32_t room = twice > 2 ? device.multiprocessors / 2 : device.multiprocessors;
    // Four take no longer to join than two do, so they pay once a warp of two has a second unit.
    const int32_t tokens_min = twice == 4 ? 2 * kTokensOfCta + 1 : twice * kTokensOfCta;
    if (twice * pairs > room || tokens_min > tokens) break;
    cluster = twice;
  }
  return cluster;
}

}  // namespace

bool StepShapeFor(const DecodeKernel& kernel, const DeviceLimits& device, const LaunchWork& work,
                  LaunchShape& shape) {
  if (kernel.step.kernel == nullptr || work.row_pairs == 0) return false;
  const int32_t unit_tokens = kernel.step.unit_tokens;
  shape = LaunchShape{};
  shape.row_pairs = work.row_pairs;
  shape.cluster = ClusterOf(device, work.pairs, work.items_max * unit_tokens);
  shape.ctas = static_cast<int32_t>(work.pairs) * shape.cluster;
  shape.warps = std::min(kWarps, kernel.warps_max);
  const int32_t warp_units = CeilDiv(CeilDiv(work.items_max, shape.cluster), shape.warps);
  const bool is_even = work.items_max * work.pairs <= 2 * work.items;
  const int32_t tokens_max = !is_even                                   ? kUnevenTokensMax
                             : 2 * shape.ctas <= device.multiprocessors ? kFewTokensMax
                                                                        : kTokensMax;
  if (warp_units * unit_tokens > tokens_max) return false;
  const int32_t ctas_each = std::min(CeilDiv(shape.ctas, device.multiprocessors), kCtasMax);
  const int32_t shared_max = SharedOfEach(device, ctas_each);
  shape.stages = std::clamp(warp_units, 1, kStagesMax);
  const auto fits = [&](int32_t bytes) { return kernel.step.shared_bytes(shape) <= bytes; };
  while (!fits(shared_max) && shape.stages > 1) --shape.stages;
  while (!fits(device.shared_per_cta) && shape.warps > 1) shape.warps /= 2;
  return true;
}

}  // namespace fp8kvd::kernels::cuda
