// kernels/cuda/brings.h: rows of appends to come that the copy engine takes to their twins, on a
// stream of its own: no launch waits for it.
// Threads: one caller at a time. Cost: no allocation once Init is done; Begin waits for the copies
//   kBrings before it.
#pragma once

#include <array>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include <cuda_runtime_api.h>

#include "kernels/backend.h"
#include "kernels/cuda/any/append.h"

namespace fp8kvd::kernels::cuda {

class Brings {
 public:
  Brings() = default;
  ~Brings();
  Brings(const Brings&) = delete;
  Brings& operator=(const Brings&) = delete;

  absl::Status Init();

  absl::StatusOr<BringId> Begin(absl::Span<const RangeCopy> ranges);
  absl::StatusOr<bool> HasArrived(BringId bring);

 private:
  static constexpr uint64_t kBrings = 16;

  cudaStream_t stream_ = nullptr;
  std::array<cudaEvent_t, kBrings> arrived_{};
  uint64_t begun_ = 0;
  uint64_t seen_ = 0;  // up to here they have arrived
};

}  // namespace fp8kvd::kernels::cuda
