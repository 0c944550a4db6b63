// bench/null_backend.h: a device whose kernels do nothing and are done at once. What remains of a
// call is everything else: parse, range check, digest, plan, staging, full-size replies. Replies
// hold whatever lay in the slot. Threads, order, errors: those of a Backend; it never fails. Blocks
// are 16 bytes, since nobody writes them.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/backend.h"

namespace fp8kvd::bench {

class NullBackend : public kernels::Backend {
 public:
  kernels::DeviceInfo Device() const override {
    return kernels::DeviceInfo{
        .kind = "null", .name = "kernels that do nothing", .returns_at_once = true};
  }
  int64_t BlockBytes(Precision /*precision*/, int32_t /*head_dim*/) const override { return 16; }

  absl::StatusOr<uint8_t*> AllocPool(int64_t bytes) override { return Alloc(bytes); }
  absl::StatusOr<int32_t*> AllocTable(int64_t entries) override {
    return reinterpret_cast<int32_t*>(Alloc(entries * static_cast<int64_t>(sizeof(int32_t))));
  }
  absl::StatusOr<uint8_t*> AllocStaging(int64_t bytes) override { return Alloc(bytes); }

  absl::Status WarmUp(absl::Span<const kernels::KernelShape> /*shapes*/, int32_t /*rows_max*/,
                      int32_t /*q_len_max*/, int32_t /*q_heads_max*/) override {
    return absl::OkStatus();
  }
  absl::Status UpdateTables(absl::Span<const kernels::TableEdit> edits) override {
    for (const kernels::TableEdit& edit : edits) *edit.at = edit.page;
    return absl::OkStatus();
  }
  absl::Status CopyPages(absl::Span<const kernels::PageCopy> /*copies*/) override {
    return absl::OkStatus();
  }
  absl::Status Append(const kernels::AppendParams& /*params*/) override { return absl::OkStatus(); }
  absl::Status Decode(const kernels::DecodeParams& /*params*/) override { return absl::OkStatus(); }
  absl::Status Poison(uint8_t* /*pool_bytes*/, int64_t /*bytes*/) override {
    return absl::OkStatus();
  }
  absl::Status Read(const uint8_t* /*pool_bytes*/, absl::Span<uint8_t> /*host*/) override {
    return absl::OkStatus();
  }
  absl::Status Write(uint8_t* /*pool_bytes*/, absl::Span<const uint8_t> /*host*/) override {
    return absl::OkStatus();
  }
  absl::StatusOr<kernels::FenceId> Fence() override { return kernels::FenceId{++fences_}; }
  absl::StatusOr<bool> Passed(kernels::FenceId /*fence*/) override { return true; }
  int64_t allocations() const override { return static_cast<int64_t>(memory_.size()); }

 private:
  struct Free {
    void operator()(uint8_t* bytes) const { std::free(bytes); }
  };

  uint8_t* Alloc(int64_t bytes) {
    const int64_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    memory_.emplace_back(static_cast<uint8_t*>(std::aligned_alloc(kAlignment, rounded)));
    return memory_.back().get();
  }

  static constexpr int64_t kAlignment = 4096;
  std::vector<std::unique_ptr<uint8_t, Free>> memory_;
  uint64_t fences_ = 0;
};

}  // namespace fp8kvd::bench
