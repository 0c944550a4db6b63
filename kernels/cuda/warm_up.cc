#include "kernels/cuda/warm_up.h"

#include <algorithm>
#include <bit>
#include <set>
#include <tuple>
#include <vector>

#include "config/base/limits.h"

namespace fp8kvd::kernels::cuda {
namespace {

// Rows: few go with the launch, more are uploaded.
constexpr int32_t kRowCounts[] = {1, 16};
constexpr int32_t kQLens[] = {1, 2, 4, 8, 16, 32};
constexpr int64_t kRowBytes = WarmUpMemory::kStagingBytes / 32;

class Runner {
 public:
  Runner(Backend* backend, const WarmUpMemory& memory) : backend_(*backend), memory_(memory) {}

  absl::Status Prepare() {
    const TableEdit edit = {memory_.table, 0};
    absl::Status status = backend_.UpdateTables(absl::MakeConstSpan(&edit, 1));
    if (!status.ok()) return status;
    const PageCopy copy = {memory_.pool + WarmUpMemory::kPoolBytes / 2, memory_.pool,
                           WarmUpMemory::kPoolBytes / 2};
    return backend_.CopyPages(absl::MakeConstSpan(&copy, 1));
  }

  absl::Status Run(const KernelShape& shape, int32_t rows_count, int32_t q_len,
                   bool batch_invariant) {
    std::vector<AppendRow> appends;
    std::vector<DecodeRow> rows;
    for (int32_t i = 0; i < rows_count; ++i) {
      uint8_t* staging = memory_.staging + i * 2 * kRowBytes;
      const auto* values = reinterpret_cast<const uint16_t*>(staging);
      appends.push_back(
          {values, values, memory_.table, memory_.pool, WarmUpMemory::kPoolBytes, 0, q_len, 1});
      DecodeRow row{};
      row.q = values;
      row.out = staging + kRowBytes;
      row.block_table = memory_.table;
      row.base = memory_.pool;
      row.page_stride = WarmUpMemory::kPoolBytes;
      row.q_len = q_len;
      row.kv_heads = 1;
      row.sm_scale = 1.0F;
      rows.push_back(row);
    }
    // All rows would write the same tokens: one append is enough.
    absl::Status status = backend_.Append({appends.data(), 1, shape.head_dim, shape.precision});
    if (!status.ok()) return status;
    return backend_.Decode({rows.data(), rows_count, shape.head_dim, shape.group, shape.precision,
                            OutType::kBf16, batch_invariant});
  }

  absl::Status Wait() {
    const absl::StatusOr<FenceId> fence = backend_.Fence();
    if (!fence.ok()) return fence.status();
    for (;;) {
      const absl::StatusOr<bool> passed = backend_.Passed(*fence);
      if (!passed.ok()) return passed.status();
      if (*passed) return absl::OkStatus();
    }
  }

 private:
  Backend& backend_;
  const WarmUpMemory memory_;
};

}  // namespace

absl::Status RunEveryKernel(Backend* backend, absl::Span<const KernelShape> shapes,
                            int32_t q_len_max, const WarmUpMemory& memory) {
  Runner runner(backend, memory);
  if (absl::Status status = runner.Prepare(); !status.ok()) return status;
  std::set<std::tuple<Precision, int32_t, uint32_t>> done;
  for (const KernelShape& shape : shapes) {
    for (const int32_t q_len : kQLens) {
      const int64_t bytes = int64_t{q_len} * shape.group * shape.head_dim * 2;
      if (q_len > q_len_max || bytes > kRowBytes) continue;
      // Kernels differ by their columns, 8, 16 or 32 of them, not by the group.
      const uint32_t columns = std::clamp(std::bit_ceil(static_cast<uint32_t>(q_len * shape.group)),
                                          uint32_t{8}, uint32_t{32});
      if (!done.insert({shape.precision, shape.head_dim, columns}).second) continue;
      for (const int32_t rows : kRowCounts) {
        for (const bool batch_invariant : {false, true}) {
          const absl::Status status = runner.Run(shape, rows, q_len, batch_invariant);
          if (!status.ok()) return status;
        }
      }
    }
    if (absl::Status status = runner.Wait(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace fp8kvd::kernels::cuda
