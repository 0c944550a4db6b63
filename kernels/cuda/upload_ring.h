// kernels/cuda/upload_ring.h: carries the small arrays of a launch (rows, copies, table edits) to
// the device. Each goes through a slot of pinned memory and one of device memory, both taken at
// start.
//
// Promises: what was sent is on the device for what is queued after Send, until a launch that was
//   queued before the next LaunchQueued is done.
// Threads: one caller at a time. Cost: one copy on the stream; waits for the device only when
//   kSlots uploads are queued and not done. Errors: kLag uploads without LaunchQueued are a bug:
//   aborts.
#pragma once

#include <array>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include <cuda_runtime_api.h>

#include "kernels/cuda/memory.h"

namespace fp8kvd::kernels::cuda {

class UploadRing {
 public:
  static constexpr int64_t kSlotBytes = 128 * 1024;

  UploadRing() = default;
  ~UploadRing();
  UploadRing(const UploadRing&) = delete;
  UploadRing& operator=(const UploadRing&) = delete;

  absl::Status Init(cudaStream_t stream);

  // Host memory for up to kSlotBytes, to be filled and sent next.
  absl::StatusOr<uint8_t*> Next();
  // Sends the first `bytes` of what Next gave. Returns where they are on the device.
  absl::StatusOr<const uint8_t*> Send(int64_t bytes);
  // The launch that reads what was sent so far is queued.
  void LaunchQueued() { unread_ = 0; }

 private:
  static constexpr int32_t kSlots = 64;
  static constexpr int32_t kHalf = kSlots / 2;
  // Uploads before the launch that reads them, at most.
  static constexpr int32_t kLag = 8;

  cudaStream_t stream_ = nullptr;
  PinnedBytes pinned_;
  DeviceBytes device_;
  int64_t sent_ = 0;
  int32_t unread_ = 0;  // sent since LaunchQueued
  // Recorded kLag slots after the last one of each half: by then the launches that read the half
  // are queued.
  std::array<cudaEvent_t, 2> half_read_{};
};

}  // namespace fp8kvd::kernels::cuda
