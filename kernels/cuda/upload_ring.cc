#include "kernels/cuda/upload_ring.h"

#include "config/base/check.h"

namespace fp8kvd::kernels::cuda {

UploadRing::~UploadRing() {
  for (cudaEvent_t event : half_read_) {
    if (event != nullptr) cudaEventDestroy(event);
  }
}

absl::Status UploadRing::Init(cudaStream_t stream) {
  stream_ = stream;
  auto pinned = AllocPinned(kSlots * kSlotBytes);
  if (!pinned.ok()) return pinned.status();
  pinned_ = *std::move(pinned);
  auto device = AllocDevice(kSlots * kSlotBytes);
  if (!device.ok()) return device.status();
  device_ = *std::move(device);
  for (cudaEvent_t& event : half_read_) {
    absl::Status status =
        ToStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<uint8_t*> UploadRing::Next() {
  FP8KVD_CHECK(unread_ < kLag);
  const int64_t half = sent_ / kHalf;  // that the slot is in, counted from the start
  const int64_t in_half = sent_ % kHalf;
  absl::Status status;
  if (in_half == kLag && half >= 1) {
    status = ToStatus(cudaEventRecord(half_read_[(half - 1) % 2], stream_),
                      "recording that uploads were read");
  } else if (in_half == 0 && half >= 2) {
    status = ToStatus(cudaEventSynchronize(half_read_[half % 2]), "waiting for uploads");
  }
  if (!status.ok()) return status;
  return pinned_.get() + sent_ % kSlots * kSlotBytes;
}

absl::StatusOr<const uint8_t*> UploadRing::Send(int64_t bytes) {
  const int64_t at = sent_ % kSlots * kSlotBytes;
  const absl::Status status = ToStatus(cudaMemcpyAsync(device_.get() + at, pinned_.get() + at,
                                                       bytes, cudaMemcpyHostToDevice, stream_),
                                       "uploading a launch's rows");
  if (!status.ok()) return status;
  ++sent_;
  ++unread_;
  return device_.get() + at;
}

}  // namespace fp8kvd::kernels::cuda
