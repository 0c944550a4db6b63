#include "kernels/cpu/backend.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include <absl/strings/str_cat.h>

#include "config/base/limits.h"
#include "kernels/cpu/append.h"
#include "kernels/cpu/page_layout.h"
#include "kernels/cpu/targets.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace fp8kvd::kernels::cpu {
namespace {

int64_t MemoryBytes(int name) { return int64_t{sysconf(name)} * sysconf(_SC_PAGESIZE); }

std::string ProcessorName() {
#if defined(__x86_64__)
  // Three leaves of 16 characters each, blanks in front and a zero behind.
  uint32_t words[13] = {};
  for (uint32_t leaf = 0; leaf < 3; ++leaf) {
    uint32_t* at = words + 4 * leaf;
    if (__get_cpuid(0x80000002 + leaf, at, at + 1, at + 2, at + 3) == 0) return "x86-64";
  }
  const std::string name(reinterpret_cast<const char*>(words));
  const size_t begin = name.find_first_not_of(' ');
  return begin == std::string::npos ? "x86-64" : name.substr(begin);
#else
  return "processor";
#endif
}

absl::Status CheckShape(int32_t head_dim, int32_t group) {
  const bool has_kernel =
      std::find(std::begin(kHeadDims), std::end(kHeadDims), head_dim) != std::end(kHeadDims) &&
      group >= 1 && group <= kGroupMax;
  if (has_kernel) return absl::OkStatus();
  std::string head_dims;
  for (const int32_t known : kHeadDims) absl::StrAppend(&head_dims, " ", known);
  return absl::UnimplementedError(
      absl::StrCat("no CPU kernel for head_dim ", head_dim, " with ", group,
                   " query heads per KV head; there are kernels for head_dim", head_dims,
                   " with 1 to ", kGroupMax, " query heads per KV head"));
}

}  // namespace

CpuBackend::CpuBackend(Workers* workers) : workers_(workers) {}

CpuBackend::~CpuBackend() {
  for (const Mapping& mapping : mappings_) munmap(mapping.at, mapping.bytes);
}

DeviceInfo CpuBackend::Device() const {
  const int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;
  const int64_t best = targets & -targets;
  DeviceInfo info;
  info.kind = "cpu";
  info.name =
      absl::StrCat(ProcessorName(), ", ", workers_->threads(), " threads, ", hwy::TargetName(best));
  info.bytes_total = MemoryBytes(_SC_PHYS_PAGES);
  info.bytes_free = MemoryBytes(_SC_AVPHYS_PAGES);
  info.threads = workers_->threads();
  return info;
}

int64_t CpuBackend::BlockBytes(Precision precision, int32_t head_dim) const {
  return PageLayout{precision, head_dim}.block_bytes();
}

absl::StatusOr<void*> CpuBackend::Map(int64_t bytes) {
  ++allocations_;
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (bytes > MemoryBytes(_SC_PHYS_PAGES) || at == MAP_FAILED) {
    if (at != MAP_FAILED) munmap(at, bytes);
    return absl::ResourceExhaustedError(
        absl::StrCat("asked for ", bytes, " bytes of memory, this machine has ",
                     MemoryBytes(_SC_PHYS_PAGES), "; configure fewer sequences or tokens"));
  }
  mappings_.push_back({at, bytes});
  return at;
}

absl::StatusOr<uint8_t*> CpuBackend::AllocPool(int64_t bytes) {
  const absl::StatusOr<void*> at = Map(bytes);
  if (!at.ok()) return at.status();
  madvise(*at, bytes, MADV_HUGEPAGE);  // fewer address translations; no matter if refused
  return static_cast<uint8_t*>(*at);
}

absl::StatusOr<int32_t*> CpuBackend::AllocTable(int64_t entries) {
  const absl::StatusOr<void*> at = Map(entries * int64_t{sizeof(int32_t)});
  if (!at.ok()) return at.status();
  return static_cast<int32_t*>(*at);
}

absl::StatusOr<uint8_t*> CpuBackend::AllocStaging(int64_t bytes) {
  const absl::StatusOr<void*> at = Map(bytes);
  if (!at.ok()) return at.status();
  return static_cast<uint8_t*>(*at);
}

absl::Status CpuBackend::WarmUp(absl::Span<const KernelShape> shapes, int32_t rows_max,
                                int32_t q_len_max, int32_t q_heads_max) {
  (void)q_heads_max;  // a thread works on one KV head at a time
  int32_t columns_max = 0;
  int32_t head_dim_max = 0;
  for (const KernelShape& shape : shapes) {
    const absl::Status status = CheckShape(shape.head_dim, shape.group);
    if (!status.ok()) return status;
    columns_max = std::max(columns_max, shape.group * q_len_max);
    head_dim_max = std::max(head_dim_max, shape.head_dim);
  }
  ++allocations_;
  workspace_.Reserve(rows_max, columns_max, head_dim_max, workers_->threads());
  return absl::OkStatus();
}

absl::Status CpuBackend::UpdateTables(absl::Span<const TableEdit> edits) {
  for (const TableEdit& edit : edits) *edit.at = edit.page;
  return absl::OkStatus();
}

absl::Status CpuBackend::CopyPages(absl::Span<const PageCopy> copies) {
  for (const PageCopy& copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
  return absl::OkStatus();
}

absl::Status CpuBackend::Append(const AppendParams& params) {
  const absl::Status status = CheckShape(params.head_dim, 1);
  if (!status.ok()) return status;
  cpu::Append(params, *workers_);
  return absl::OkStatus();
}

absl::Status CpuBackend::Decode(const DecodeParams& params) {
  const absl::Status status = CheckShape(params.head_dim, params.group);
  if (!status.ok()) return status;
  int32_t columns = 0;
  for (int32_t i = 0; i < params.rows_count; ++i) {
    columns = std::max(columns, params.rows[i].q_len * params.group);
  }
  if (params.rows_count > workspace_.plan.rows_max() || columns > workspace_.columns_max() ||
      params.head_dim > workspace_.head_dim_max()) {
    return absl::InternalError(absl::StrCat(
        "a launch of ", params.rows_count, " rows, ", columns, " columns and head_dim ",
        params.head_dim, " is beyond what WarmUp was asked for: ", workspace_.plan.rows_max(),
        " rows, ", workspace_.columns_max(), " columns, head_dim ", workspace_.head_dim_max()));
  }
  cpu::Decode(params, workspace_, *workers_);
  return absl::OkStatus();
}

absl::Status CpuBackend::Poison(uint8_t* pool_bytes, int64_t bytes) {
  std::memset(pool_bytes, 0xFF, bytes);
  return absl::OkStatus();
}

absl::Status CpuBackend::Read(const uint8_t* pool_bytes, absl::Span<uint8_t> host) {
  std::memcpy(host.data(), pool_bytes, host.size());
  return absl::OkStatus();
}

absl::Status CpuBackend::Write(uint8_t* pool_bytes, absl::Span<const uint8_t> host) {
  std::memcpy(pool_bytes, host.data(), host.size());
  return absl::OkStatus();
}

absl::StatusOr<FenceId> CpuBackend::Fence() { return FenceId{++fences_}; }

absl::StatusOr<bool> CpuBackend::Passed(FenceId fence) { return fence.value <= fences_; }

}  // namespace fp8kvd::kernels::cpu
