#include "kernels/cuda/fences.h"

namespace fp8kvd::kernels::cuda {

Fences::~Fences() {
  for (const Fence& fence : fences_) {
    if (fence.event != nullptr) cudaEventDestroy(fence.event);
  }
}

absl::Status Fences::Init() {
  for (Fence& fence : fences_) {
    const absl::Status status =
        ToStatus(cudaEventCreateWithFlags(&fence.event, cudaEventDisableTiming), "making an event");
    if (!status.ok()) return status;
  }
  constexpr int64_t kLine = 128;  // a word alone in its line
  auto flag = AllocPinned(kLine);
  if (!flag.ok()) return flag.status();
  flag_ = *std::move(flag);
  auto arrivals = AllocDevice(kLine);
  if (!arrivals.ok()) return arrivals.status();
  arrivals_ = *std::move(arrivals);
  return absl::OkStatus();
}

DoneMark Fences::NextMark() {
  auto* arrivals = reinterpret_cast<uint32_t*>(arrivals_.get());
  if (marks_given_ > taken_) return {};
  marks_given_ = taken_ + 1;
  return {reinterpret_cast<uint32_t*>(flag_.get()), arrivals, static_cast<uint32_t>(marks_given_)};
}

absl::StatusOr<FenceId> Fences::Take(cudaStream_t stream) {
  const uint64_t id = taken_ + 1;
  while (id > kFences && passed_ < id - kFences) {
    const absl::StatusOr<bool> passed = Passed(FenceId{id - kFences});
    if (!passed.ok()) return passed.status();
  }
  Fence& fence = fences_[id % kFences];
  fence.stream = stream;
  fence.is_flag = is_marked_ && marks_given_ == id;
  if (!fence.is_flag) {
    const absl::Status status = ToStatus(cudaEventRecord(fence.event, stream), "setting a fence");
    if (!status.ok()) return status;
  }
  taken_ = id;
  is_marked_ = false;
  return FenceId{id};
}

absl::StatusOr<bool> Fences::Passed(FenceId fence) {
  while (passed_ < fence.value) {
    const absl::StatusOr<bool> passed = HasPassed(passed_ + 1);
    if (!passed.ok() || !*passed) return passed;
    ++passed_;
  }
  return true;
}

absl::StatusOr<bool> Fences::HasPassed(uint64_t id) {
  const Fence& fence = fences_[id % kFences];
  cudaError_t error = cudaErrorNotReady;
  if (fence.is_flag) {
    const auto* flag = reinterpret_cast<const uint32_t*>(flag_.get());
    const uint32_t reached = __atomic_load_n(flag, __ATOMIC_ACQUIRE);
    if (static_cast<int32_t>(reached - static_cast<uint32_t>(id)) >= 0) return true;
    if (++polls_ % kPollsOfFlag != 0) return false;
    error = cudaStreamQuery(fence.stream);
    if (error == cudaSuccess) return false;  // the word is on its way: the next look finds it
  } else {
    error = cudaEventQuery(fence.event);
  }
  if (error == cudaErrorNotReady) return false;
  const absl::Status status = ToStatus(error, "asking for a fence");
  if (!status.ok()) return status;
  return true;
}

}  // namespace fp8kvd::kernels::cuda
