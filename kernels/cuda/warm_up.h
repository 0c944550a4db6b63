// kernels/cuda/warm_up.h: runs every kernel once, so that the first request loads none.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/backend.h"

namespace fp8kvd::kernels::cuda {

// One sequence of one token and one page, over memory of the backend's.
struct WarmUpMemory {
  uint8_t* pool;     // kPoolBytes
  int32_t* table;    // 1 entry
  uint8_t* staging;  // kStagingBytes

  static constexpr int64_t kPoolBytes = int64_t{1} << 20;
  static constexpr int64_t kStagingBytes = int64_t{4} << 20;
};

// Edits a table, copies pages, appends and decodes, with each number of query columns that has a
// kernel, by each path of the bytes (step_path.h), batch_invariant or not; then waits for it.
absl::Status RunEveryKernel(Backend* backend, absl::Span<const KernelShape> shapes,
                            int32_t q_len_max, const WarmUpMemory& memory);

}  // namespace fp8kvd::kernels::cuda
