#include "kernels/cuda/step_path.h"

namespace fp8kvd::kernels::cuda {

bool AreNear(int32_t rows, const StepLimits& limits) {
  return rows > 0 && rows <= limits.near_rows_max;
}

StepPath PathFor(const StepSize& size, const StepLimits& limits) {
  const bool is_one_piece = size.query_ranges + size.kv_ranges <= kCopiesMax;
  if (AreNear(size.rows, limits)) return StepPath::kNear;
  if (size.rows > 0 && limits.near_rows_max > 0 && !is_one_piece) return StepPath::kNear;
  const bool is_copied = size.in_bytes >= limits.copy_bytes_min && is_one_piece;
  return is_copied ? StepPath::kCopied : StepPath::kFetch;
}

bool CopiesOut(const StepSize& size, const StepLimits& limits) {
  return size.out_bytes >= limits.out_copy_bytes_min && size.out_ranges <= kCopiesMax;
}

}  // namespace fp8kvd::kernels::cuda
