// kernels/cuda/step_path.h: how the bytes of a step cross the bus, chosen by their number. Plain
// arithmetic, tested without a GPU. docs/performance.md has the times that the bounds come from.
#pragma once

#include <cstdint>

namespace fp8kvd::kernels::cuda {

struct StepLimits {
  // Up to so many rows, and all that lie in many pieces, go as launches that do all of a step
  // (step_launches.h), where there are such for them. 0: none of the former.
  int32_t step_rows_max = 256;
  // Of others, up to so many rows, and all that lie in many pieces, go with launches of
  // NearRows::kMax each, and kernels fetch the tensors: of one part while the part before is
  // decoded. 0: none.
  int32_t near_rows_max = 128;
  // From here on the copy engines bring what lies in few pieces.
  int64_t copy_bytes_min = int64_t{512} << 10;
  // From here on results are copied out, too; less is written by the kernels, while they work.
  int64_t out_copy_bytes_min = int64_t{1} << 20;
};

// What a step moves.
struct StepSize {
  int32_t rows = 0;  // of the decode
  int32_t query_ranges = 0;
  int32_t kv_ranges = 0;
  int64_t in_bytes = 0;
  int64_t out_bytes = 0;
  int32_t out_ranges = 0;
};

enum class StepPath : uint8_t {
  kNear,    // rows go with the launches, kernels fetch (step_launches.h, or an append that does)
  kFetch,   // rows are uploaded, kernels fetch
  kCopied,  // rows are uploaded, the copy engine brings the tensors
};

// A copy costs about as much as fetching 64 KiB does: more pieces than this are fetched.
inline constexpr int32_t kCopiesMax = 12;

// So few rows go kNear, whatever else there is of them.
bool AreNear(int32_t rows, const StepLimits& limits);
StepPath PathFor(const StepSize& size, const StepLimits& limits);
bool CopiesOut(const StepSize& size, const StepLimits& limits);

}  // namespace fp8kvd::kernels::cuda
