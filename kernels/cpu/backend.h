// kernels/cpu/backend.h: the Backend that runs on the processor, for machines without a GPU.
//
// A launch runs inside the call, on the threads that were handed in, so every fence has passed by
// the time it is taken. Every launch is batch invariant (split_plan.h), whether asked for or not.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/decode.h"
#include "kernels/workers.h"

namespace fp8kvd::kernels::cpu {

class CpuBackend final : public Backend {
 public:
  // workers outlives this; nobody else runs it while a call of this is in progress.
  explicit CpuBackend(Workers* workers);
  ~CpuBackend() override;
  CpuBackend(const CpuBackend&) = delete;
  CpuBackend& operator=(const CpuBackend&) = delete;

  DeviceInfo Device() const override;
  int64_t BlockBytes(Precision precision, int32_t head_dim) const override;

  // Page-aligned and zeroed, and not backed by memory until first written.
  absl::StatusOr<uint8_t*> AllocPool(int64_t bytes) override;
  absl::StatusOr<int32_t*> AllocTable(int64_t entries) override;
  absl::StatusOr<uint8_t*> AllocStaging(int64_t bytes) override;

  // May be called again: what launches may need is the largest of all calls.
  absl::Status WarmUp(absl::Span<const KernelShape> shapes, int32_t rows_max, int32_t q_len_max,
                      int32_t q_heads_max) override;

  absl::Status UpdateTables(absl::Span<const TableEdit> edits) override;
  absl::Status CopyPages(absl::Span<const PageCopy> copies) override;
  absl::Status Append(const AppendParams& params) override;
  absl::Status Decode(const DecodeParams& params) override;
  absl::Status Poison(uint8_t* pool_bytes, int64_t bytes) override;
  absl::Status Read(const uint8_t* pool_bytes, absl::Span<uint8_t> host) override;
  absl::Status Write(uint8_t* pool_bytes, absl::Span<const uint8_t> host) override;
  absl::StatusOr<FenceId> Fence() override;
  absl::StatusOr<bool> Passed(FenceId fence) override;
  int64_t allocations() const override { return allocations_; }

 private:
  struct Mapping {
    void* at;
    int64_t bytes;
  };

  absl::StatusOr<void*> Map(int64_t bytes);

  Workers* const workers_;
  DecodeWorkspace workspace_;
  std::vector<Mapping> mappings_;
  uint64_t fences_ = 0;
  int64_t allocations_ = 0;
};

}  // namespace fp8kvd::kernels::cpu
