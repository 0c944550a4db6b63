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
  auto flags = AllocPinned(kFlags * int64_t{sizeof(uint64_t)});
  if (!flags.ok()) return flags.status();
  flags_ = *std::move(flags);
  constexpr int64_t kLine = 128;  // a word alone in its line
  auto arrivals = AllocDevice(kLine);
  if (!arrivals.ok()) return arrivals.status();
  arrivals_ = *std::move(arrivals);
  return absl::OkStatus();
}

DoneMark Fences::NextMark(int32_t ctas) {
  if (marks_given_ > taken_) return {};
  marks_given_ = taken_ + 1;
  const bool has_each = ctas <= kFlags;
  mark_flags_ = has_each ? ctas : 1;
  return {reinterpret_cast<uint64_t*>(flags_.get()),
          has_each ? nullptr : reinterpret_cast<uint32_t*>(arrivals_.get()), marks_given_};
}

absl::StatusOr<FenceId> Fences::Take(cudaStream_t stream) {
  const uint64_t id = taken_ + 1;
  while (id > kFences && passed_ < id - kFences) {
    const absl::StatusOr<bool> passed = Passed(FenceId{id - kFences});
    if (!passed.ok()) return passed.status();
  }
  Fence& fence = fences_[id % kFences];
  fence.stream = stream;
  fence.flags = is_marked_ && marks_given_ == id ? mark_flags_ : 0;
  if (fence.flags == 0) {
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
    flags_up_ = 0;
  }
  return true;
}

// A flag that a later fence has raised was up for this one, since launches end in their order.
bool Fences::AreFlagsUp(uint64_t id) {
  const auto* flags = reinterpret_cast<const uint64_t*>(flags_.get());
  const int32_t count = fences_[id % kFences].flags;
  while (flags_up_ < count) {
    if (__atomic_load_n(flags + flags_up_, __ATOMIC_ACQUIRE) < id) return false;
    ++flags_up_;
  }
  return true;
}

absl::StatusOr<bool> Fences::HasPassed(uint64_t id) {
  const Fence& fence = fences_[id % kFences];
  cudaError_t error = cudaErrorNotReady;
  if (fence.flags > 0) {
    if (AreFlagsUp(id)) return true;
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
