#include "kernels/cuda/step_outputs.h"

namespace fp8kvd::kernels::cuda {

StepOutputs::~StepOutputs() {
  if (queued_ != nullptr) cudaEventDestroy(queued_);
  if (copies_ != nullptr) {
    cudaStreamSynchronize(copies_);
    cudaStreamDestroy(copies_);
  }
}

absl::Status StepOutputs::Init(cudaStream_t stream) {
  stream_ = stream;
  const absl::Status status =
      ToStatus(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking), "making a stream");
  if (!status.ok()) return status;
  return ToStatus(cudaEventCreateWithFlags(&queued_, cudaEventDisableTiming), "making an event");
}

int32_t StepOutputs::List(absl::Span<const DecodeRow> rows, const DecodeParams& params) {
  const int64_t element = params.out_type == OutType::kFp32 ? 4 : 2;
  ranges_.Clear();
  for (const DecodeRow& row : rows) {
    const int64_t columns = int64_t{row.q_len} * row.kv_heads * params.group;
    ranges_.Add(row.out, columns * params.head_dim * element);
  }
  for (const DecodeRow& row : rows) {
    const int64_t columns = int64_t{row.q_len} * row.kv_heads * params.group;
    if (row.lse != nullptr) ranges_.Add(row.lse, columns * int64_t{sizeof(float)});
  }
  return ranges_.count();
}

bool StepOutputs::Turn(absl::Span<DecodeRow> rows, const DecodeParams& params) {
  List(rows, params);
  if (!ranges_.FindTwins(*twins_)) return false;
  for (DecodeRow& row : rows) {
    row.out = twins_->Of(static_cast<uint8_t*>(row.out));
    if (row.lse != nullptr) row.lse = twins_->Of(row.lse);
  }
  return true;
}

absl::Status StepOutputs::FollowStream() {
  const absl::Status status = ToStatus(cudaEventRecord(queued_, stream_), "recording a launch");
  if (!status.ok()) return status;
  return ToStatus(cudaStreamWaitEvent(copies_, queued_, 0), "waiting for a launch");
}

absl::Status StepOutputs::CopyOut() {
  if (absl::Status status = FollowStream(); !status.ok()) return status;
  for (const RangeCopy& range : ranges_.ranges()) {
    const absl::Status status =
        ToStatus(cudaMemcpyAsync(const_cast<uint8_t*>(range.from), range.to, range.bytes,
                                 cudaMemcpyDeviceToHost, copies_),
                 "copying results out");
    if (!status.ok()) return status;
  }
  has_copies_ = true;
  return absl::OkStatus();
}

absl::StatusOr<cudaStream_t> StepOutputs::Join() {
  if (!has_copies_) return stream_;
  has_copies_ = false;
  if (absl::Status status = FollowStream(); !status.ok()) return status;
  return copies_;
}

}  // namespace fp8kvd::kernels::cuda
