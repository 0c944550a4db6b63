#include "kernels/cuda/brings.h"

#include "kernels/cuda/memory.h"

namespace fp8kvd::kernels::cuda {

Brings::~Brings() {
  if (stream_ != nullptr) {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  for (cudaEvent_t event : arrived_) {
    if (event != nullptr) cudaEventDestroy(event);
  }
}

absl::Status Brings::Init() {
  absl::Status status =
      ToStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
  for (cudaEvent_t& event : arrived_) {
    if (!status.ok()) return status;
    status = ToStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
  }
  return status;
}

absl::StatusOr<BringId> Brings::Begin(absl::Span<const RangeCopy> ranges) {
  const uint64_t id = begun_ + 1;
  while (id > kBrings && seen_ < id - kBrings) {
    const absl::StatusOr<bool> arrived = HasArrived(BringId{id - kBrings});
    if (!arrived.ok()) return arrived.status();
  }
  for (const RangeCopy& range : ranges) {
    const absl::Status status = ToStatus(
        cudaMemcpyAsync(range.to, range.from, range.bytes, cudaMemcpyHostToDevice, stream_),
        "bringing rows");
    if (!status.ok()) return status;
  }
  const absl::Status status =
      ToStatus(cudaEventRecord(arrived_[id % kBrings], stream_), "recording rows on their way");
  if (!status.ok()) return status;
  begun_ = id;
  return BringId{id};
}

absl::StatusOr<bool> Brings::HasArrived(BringId bring) {
  while (seen_ < bring.value) {
    const cudaError_t error = cudaEventQuery(arrived_[(seen_ + 1) % kBrings]);
    if (error == cudaErrorNotReady) return false;
    if (absl::Status status = ToStatus(error, "asking for rows on their way"); !status.ok()) {
      return status;
    }
    ++seen_;
  }
  return true;
}

}  // namespace fp8kvd::kernels::cuda
