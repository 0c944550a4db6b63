// kernels/cuda/fences.h: places in the order of a backend's work, seen from the host by polling.
//
// A fence after a decode that marks its own end (any/near_and_done.cuh) is a word of pinned memory,
// or one for each of its CTAs, which costs the device nothing more; any other is an event.
//
// Promises: Passed never waits; fences pass in the order in which they were taken; a device fault
//   comes out of Passed within kPollsOfFlag calls.
// Threads: one caller at a time. Cost: no allocation once Init is done; Take waits for the fence
//   kFences before it.
#pragma once

#include <array>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include <cuda_runtime_api.h>

#include "kernels/backend.h"
#include "kernels/cuda/decode_args.h"
#include "kernels/cuda/memory.h"

namespace fp8kvd::kernels::cuda {

class Fences {
 public:
  static constexpr int32_t kFences = 256;
  static constexpr int32_t kPollsOfFlag = 256;
  // CTAs that have a flag each. Of more, the words on the bus take as long as counting them.
  static constexpr int32_t kFlags = 64;

  Fences() = default;
  ~Fences();
  Fences(const Fences&) = delete;
  Fences& operator=(const Fences&) = delete;

  absl::Status Init();

  // The mark for the decode queued next, of so many CTAs, which the fence taken next may then stand
  // for; empty if that fence has given its mark already.
  DoneMark NextMark(int32_t ctas);
  // The last launch queued bears NextMark's mark; or something was queued after it.
  void SetMarked(bool is_marked) { is_marked_ = is_marked; }

  // Whether Passed has said so of every fence.
  bool AllPassed() const { return passed_ == taken_; }

  absl::StatusOr<FenceId> Take(cudaStream_t stream);
  absl::StatusOr<bool> Passed(FenceId fence);

 private:
  struct Fence {
    cudaEvent_t event = nullptr;
    cudaStream_t stream = nullptr;
    int32_t flags = 0;  // 0: the event
  };

  absl::StatusOr<bool> HasPassed(uint64_t id);
  bool AreFlagsUp(uint64_t id);

  std::array<Fence, kFences> fences_{};
  PinnedBytes flags_;  // [kFlags] the latest marked fence that a CTA reached
  DeviceBytes arrivals_;
  uint64_t taken_ = 0;
  uint64_t passed_ = 0;
  uint64_t marks_given_ = 0;  // for fences up to this one
  int32_t mark_flags_ = 0;    // of the last one
  int32_t flags_up_ = 0;      // of the first fence that has not passed
  bool is_marked_ = false;
  int32_t polls_ = 0;
};

}  // namespace fp8kvd::kernels::cuda
