#include "kernels/cuda/backend.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include <cuda_runtime_api.h>

#include "config/base/check.h"
#include "config/base/limits.h"
#include "kernels/cuda/any/append.h"
#include "kernels/cuda/any/copy.h"
#include "kernels/cuda/brings.h"
#include "kernels/cuda/decode_launches.h"
#include "kernels/cuda/decode_table.h"
#include "kernels/cuda/fences.h"
#include "kernels/cuda/launch_shape.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/nvtx.h"
#include "kernels/cuda/page_layout.h"
#include "kernels/cuda/staging_twins.h"
#include "kernels/cuda/step_inputs.h"
#include "kernels/cuda/step_launches.h"
#include "kernels/cuda/step_outputs.h"
#include "kernels/cuda/step_path.h"
#include "kernels/cuda/warm_up.h"
#include "kernels/cuda/writes.h"

namespace fp8kvd::kernels::cuda {
namespace {

template <class T>
constexpr int64_t kPerUpload = StepInputs::kPerUpload<T>;
static_assert(kPerUpload<DecodeRow> >= kItemsMax, "the rows of a launch are one upload");
static_assert(kPerUpload<AppendRow> >= kItemsMax && kPerUpload<RangeCopy> >= 2 * kItemsMax);

class CudaBackend final : public Backend {
 public:
  static absl::StatusOr<std::unique_ptr<Backend>> Make(const CudaOptions& options);
  ~CudaBackend() override;

  DeviceInfo Device() const override;
  int64_t BlockBytes(Precision precision, int32_t head_dim) const override {
    return BlockBytesOf(precision, head_dim);
  }

  absl::StatusOr<uint8_t*> AllocPool(int64_t bytes) override;
  absl::StatusOr<int32_t*> AllocTable(int64_t entries) override;
  absl::StatusOr<uint8_t*> AllocStaging(int64_t bytes) override;
  absl::Status WarmUp(absl::Span<const KernelShape> shapes, int32_t rows_max, int32_t q_len_max,
                      int32_t q_heads_max) override;

  absl::Status UpdateTables(absl::Span<const TableEdit> edits) override;
  absl::Status CopyPages(absl::Span<const PageCopy> copies) override;
  absl::StatusOr<std::optional<BringId>> Bring(const AppendParams& params) override;
  absl::StatusOr<bool> Brought(BringId bring) override;
  absl::Status Append(const AppendParams& params) override;
  absl::Status Decode(const DecodeParams& params) override;
  absl::Status Poison(uint8_t* pool_bytes, int64_t bytes) override;
  absl::Status Read(const uint8_t* pool_bytes, absl::Span<uint8_t> host) override;
  absl::Status Write(uint8_t* pool_bytes, absl::Span<const uint8_t> host) override;

  absl::StatusOr<FenceId> Fence() override;
  absl::StatusOr<bool> Passed(FenceId fence) override;
  int64_t allocations() const override { return allocations_; }

 private:
  explicit CudaBackend(const CudaOptions& options) : options_(options) {}
  absl::Status Init();

  // Makes our device the calling thread's: CUDA keeps that by thread, and calls may come from any,
  // one at a time. Costs a comparison once a thread is bound.
  absl::Status BindThread() const;

  // What is kept back goes first; whatever is queued now is no marked decode.
  absl::Status Flush();

  // Of kItemsMax rows at most: brings their queries, decodes, and brings the results back.
  absl::Status DecodeStep(absl::Span<DecodeRow> rows, const DecodeParams& params);
  // The same by the path kNear.
  absl::Status DecodeNear(absl::Span<DecodeRow> rows, const DecodeParams& params);
  const CudaOptions options_;
  int32_t sm_ = 80;  // rows of the table that are used
  cudaDeviceProp properties_{};
  cudaStream_t stream_ = nullptr;
  int64_t allocations_ = 0;
  std::vector<DeviceBytes> device_memory_;
  StagingTwins staging_;

  Writes writes_;
  StepInputs inputs_{&staging_, &writes_};
  StepOutputs outputs_{&staging_};
  Brings brings_;
  Fences fences_;
  DecodeLaunches decodes_{&inputs_, &writes_, &fences_};
  StepLaunches steps_{&inputs_, &writes_, &fences_};
  WarmUpMemory warm_{};
  std::vector<DecodeRow> rows_;  // room for kItemsMax
};

absl::StatusOr<std::unique_ptr<Backend>> CudaBackend::Make(const CudaOptions& options) {
  std::unique_ptr<CudaBackend> backend(new CudaBackend(options));
  absl::Status status = backend->Init();
  if (!status.ok()) return status;
  return absl::StatusOr<std::unique_ptr<Backend>>(std::move(backend));
}

absl::Status CudaBackend::Init() {
  int count = 0;
  const cudaError_t counted = cudaGetDeviceCount(&count);
  if (counted != cudaSuccess || count == 0) {
    cudaGetLastError();
    return absl::NotFoundError(std::string("no CUDA device (") + cudaGetErrorString(counted) +
                               "); install a driver or use --device=cpu");
  }
  if (options_.device < 0 || options_.device >= count) {
    return absl::InvalidArgumentError("CUDA device " + std::to_string(options_.device) +
                                      " asked for, 0 to " + std::to_string(count - 1) +
                                      " are here; name one of them in devices");
  }
  absl::Status status = BindThread();
  if (!status.ok()) return status;
  status = ToStatus(cudaGetDeviceProperties(&properties_, options_.device), "asking the device");
  if (!status.ok()) return status;
  if (properties_.major < 8) {
    return absl::UnimplementedError("the device is sm_" + std::to_string(properties_.major) +
                                    std::to_string(properties_.minor) +
                                    ", kernels exist from sm_80 on; use --device=cpu");
  }
  const bool is_hopper = properties_.major == 9 && properties_.minor == 0;
  const bool has_own = std::any_of(DecodeTable().begin(), DecodeTable().end(),
                                   [](const DecodeKernel& kernel) { return kernel.sm == 90; });
  sm_ = is_hopper && has_own && !options_.generic_kernels ? 90 : 80;
  status = ToStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
  if (!status.ok()) return status;
  rows_.reserve(kItemsMax);
  ++allocations_;
  status = fences_.Init();
  if (status.ok()) status = outputs_.Init(stream_);
  if (status.ok()) status = inputs_.Init(stream_);
  if (status.ok()) status = brings_.Init();
  const DeviceLimits limits = {
      properties_.multiProcessorCount, static_cast<int32_t>(properties_.sharedMemPerMultiprocessor),
      static_cast<int32_t>(properties_.sharedMemPerBlockOptin), options_.one_warpgroup};
  decodes_.Init(sm_, limits, stream_);
  steps_.Init(sm_, limits, stream_);
  return status;
}

CudaBackend::~CudaBackend() {
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

DeviceInfo CudaBackend::Device() const {
  DeviceInfo info;
  info.kind = "cuda";
  info.returns_at_once = true;
  info.name = std::string(properties_.name) + " (sm_" + std::to_string(properties_.major) +
              std::to_string(properties_.minor) + ", kernels of sm_" + std::to_string(sm_) + ")";
  char bus_id[32];
  std::snprintf(
      bus_id, sizeof(bus_id), "%08x:%02x:%02x.0", static_cast<unsigned>(properties_.pciDomainID),
      static_cast<unsigned>(properties_.pciBusID), static_cast<unsigned>(properties_.pciDeviceID));
  info.pci_bus_id = bus_id;
  size_t free = 0;
  size_t total = 0;
  if (BindThread().ok() && cudaMemGetInfo(&free, &total) == cudaSuccess) {
    info.bytes_free = static_cast<int64_t>(free);
    info.bytes_total = static_cast<int64_t>(total);
  }
  return info;
}

absl::Status CudaBackend::BindThread() const {
  thread_local int32_t bound = -1;
  if (bound == options_.device) return absl::OkStatus();
  absl::Status status = ToStatus(cudaSetDevice(options_.device), "choosing the device");
  if (status.ok()) bound = options_.device;
  return status;
}

absl::StatusOr<uint8_t*> CudaBackend::AllocPool(int64_t bytes) {
  if (absl::Status bound = BindThread(); !bound.ok()) return bound;
  auto memory = AllocDevice(bytes);
  if (!memory.ok()) return memory.status();
  ++allocations_;
  device_memory_.push_back(*std::move(memory));
  return device_memory_.back().get();
}

absl::StatusOr<int32_t*> CudaBackend::AllocTable(int64_t entries) {
  auto memory = AllocPool(entries * int64_t{sizeof(int32_t)});
  if (!memory.ok()) return memory.status();
  return reinterpret_cast<int32_t*>(*memory);
}

absl::StatusOr<uint8_t*> CudaBackend::AllocStaging(int64_t bytes) {
  if (absl::Status bound = BindThread(); !bound.ok()) return bound;
  ++allocations_;
  return staging_.Alloc(bytes);
}

absl::Status CudaBackend::WarmUp(absl::Span<const KernelShape> shapes, int32_t rows_max,
                                 int32_t q_len_max, int32_t q_heads_max) {
  FP8KVD_CHECK(rows_max <= kItemsMax);
  if (absl::Status bound = BindThread(); !bound.ok()) return bound;
  absl::Status status = decodes_.Prepare(shapes, q_len_max, q_heads_max, &allocations_);
  if (status.ok()) status = steps_.Prepare(shapes, &allocations_);
  if (!status.ok()) return status;
  if (warm_.pool == nullptr) {
    const auto pool = AllocPool(WarmUpMemory::kPoolBytes);
    const auto table = AllocTable(1);
    const auto staging = AllocStaging(WarmUpMemory::kStagingBytes);
    if (!pool.ok()) return pool.status();
    if (!table.ok()) return table.status();
    if (!staging.ok()) return staging.status();
    warm_ = {*pool, *table, *staging};
  }
  return RunEveryKernel(this, shapes, q_len_max, warm_);
}

absl::Status CudaBackend::Flush() {
  if (absl::Status bound = BindThread(); !bound.ok()) return bound;
  fences_.SetMarked(false);
  return inputs_.Flush(options_.step);
}

absl::Status CudaBackend::UpdateTables(absl::Span<const TableEdit> edits) {
  const ProfilerRange range("fp8kvd tables");
  if (absl::Status flushed = Flush(); !flushed.ok()) return flushed;
  while (!edits.empty()) {
    const auto some = edits.subspan(0, kPerUpload<TableEdit>);
    const auto count = static_cast<int32_t>(some.size());
    cudaError_t error = cudaSuccess;
    if (count <= NearEdits::kMax) {
      NearEdits near;
      std::copy(some.begin(), some.end(), near.edits);
      error = LaunchNearEdits(near, count, stream_);
    } else {
      const auto at = inputs_.Upload(some);
      if (!at.ok()) return at.status();
      error = LaunchTableEdits(*at, count, stream_);
    }
    if (absl::Status status = ToStatus(error, "editing block tables"); !status.ok()) return status;
    inputs_.LaunchQueued();
    edits.remove_prefix(some.size());
    writes_.Tables();
  }
  return absl::OkStatus();
}

absl::Status CudaBackend::CopyPages(absl::Span<const PageCopy> copies) {
  const ProfilerRange range("fp8kvd copy pages");
  if (absl::Status flushed = Flush(); !flushed.ok()) return flushed;
  while (!copies.empty()) {
    const auto some = copies.subspan(0, kPerUpload<PageCopy>);
    const auto at = inputs_.Upload(some);
    if (!at.ok()) return at.status();
    int64_t bytes_max = 0;
    for (const PageCopy& copy : some) bytes_max = std::max(bytes_max, copy.bytes);
    const absl::Status status =
        ToStatus(LaunchCopyPages(*at, static_cast<int32_t>(some.size()), bytes_max, stream_),
                 "copying pages");
    if (!status.ok()) return status;
    inputs_.LaunchQueued();
    copies.remove_prefix(some.size());
    writes_.Other();
  }
  return absl::OkStatus();
}

absl::Status CudaBackend::Append(const AppendParams& params) {
  const ProfilerRange range("fp8kvd append");
  if (absl::Status flushed = Flush(); !flushed.ok()) return flushed;
  absl::Status status = inputs_.Append(params, options_.step);
  // No decode takes it in, and none has to read it over the bus.
  if (status.ok() && params.is_brought) status = inputs_.Flush(options_.step);
  return status;
}

absl::StatusOr<std::optional<BringId>> CudaBackend::Bring(const AppendParams& params) {
  if (absl::Status bound = BindThread(); !bound.ok()) return bound;
  const absl::Span<const RangeCopy> ranges = inputs_.RangesToBring(params, options_.step);
  if (ranges.empty()) return std::optional<BringId>();
  const absl::StatusOr<BringId> bring = brings_.Begin(ranges);
  if (!bring.ok()) return bring.status();
  return std::optional<BringId>(*bring);
}

absl::StatusOr<bool> CudaBackend::Brought(BringId bring) { return brings_.HasArrived(bring); }

absl::Status CudaBackend::Decode(const DecodeParams& params) {
  const ProfilerRange range("fp8kvd decode");
  if (absl::Status bound = BindThread(); !bound.ok()) return bound;
  fences_.SetMarked(false);
  absl::Status known = decodes_.CheckShape({params.head_dim, params.group, params.precision});
  if (!known.ok()) return known;
  absl::Span<const DecodeRow> rows(params.rows, params.rows_count);
  while (!rows.empty()) {
    const auto some = rows.subspan(0, kItemsMax);
    rows_.assign(some.begin(), some.end());
    if (absl::Status status = DecodeStep(absl::MakeSpan(rows_), params); !status.ok()) {
      return status;
    }
    rows.remove_prefix(some.size());
  }
  return absl::OkStatus();
}

absl::Status CudaBackend::DecodeStep(absl::Span<DecodeRow> rows, const DecodeParams& params) {
  if (!inputs_.Fits(params)) {
    if (absl::Status status = inputs_.Flush(options_.step); !status.ok()) return status;
  }
  const auto count = static_cast<int32_t>(rows.size());
  const bool are_few = count <= options_.step.step_rows_max;
  absl::StatusOr<bool> is_done = false;
  if (are_few) is_done = steps_.Run(rows, params);
  if (!is_done.ok() || *is_done) return is_done.status();
  if (AreNear(count, options_.step)) return DecodeNear(rows, params);
  StepSize size = inputs_.Measure(rows, params);
  size.out_ranges = outputs_.List(rows, params);
  const StepPath path = PathFor(size, options_.step);
  if (path == StepPath::kNear) {
    if (!are_few) is_done = steps_.Run(rows, params);
    if (!is_done.ok() || *is_done) return is_done.status();
    return DecodeNear(rows, params);
  }
  absl::Status status = inputs_.Bring(path, rows, params);
  if (!status.ok()) return status;
  const bool is_copied_out = CopiesOut(size, options_.step) && outputs_.Turn(rows, params);
  status = decodes_.Run(rows, params, path, /*may_mark=*/!is_copied_out);
  if (status.ok() && is_copied_out) status = outputs_.CopyOut();
  return status;
}

absl::Status CudaBackend::DecodeNear(absl::Span<DecodeRow> rows, const DecodeParams& params) {
  if (!inputs_.KeptFollows(rows)) {
    if (absl::Status status = inputs_.Flush(options_.step); !status.ok()) return status;
  }
  // batch_invariant: rows are sorted into launches by how they are cut.
  const size_t part_rows = params.batch_invariant ? rows.size() : NearRows::kMax;
  for (size_t first = 0; first < rows.size(); first += part_rows) {
    const absl::Span<DecodeRow> part = rows.subspan(first, part_rows);
    const bool is_last = first + part_rows >= rows.size();
    const StepPath path = part.size() <= NearRows::kMax ? StepPath::kNear : StepPath::kFetch;
    absl::Status status = inputs_.Bring(path, part, params);
    if (status.ok()) status = decodes_.Run(part, params, path, /*may_mark=*/is_last);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CudaBackend::Poison(uint8_t* pool_bytes, int64_t bytes) {
  if (absl::Status flushed = Flush(); !flushed.ok()) return flushed;
  writes_.Other();
  return ToStatus(cudaMemsetAsync(pool_bytes, 0xFF, bytes, stream_), "poisoning pages");
}

absl::Status CudaBackend::Read(const uint8_t* pool_bytes, absl::Span<uint8_t> host) {
  if (absl::Status flushed = Flush(); !flushed.ok()) return flushed;
  const absl::Status status = ToStatus(
      cudaMemcpyAsync(host.data(), pool_bytes, host.size(), cudaMemcpyDeviceToHost, stream_),
      "reading pages");
  if (!status.ok()) return status;
  return ToStatus(cudaStreamSynchronize(stream_), "waiting for pages");
}

absl::Status CudaBackend::Write(uint8_t* pool_bytes, absl::Span<const uint8_t> host) {
  if (absl::Status flushed = Flush(); !flushed.ok()) return flushed;
  writes_.Other();
  const absl::Status status = ToStatus(
      cudaMemcpyAsync(pool_bytes, host.data(), host.size(), cudaMemcpyHostToDevice, stream_),
      "writing pages");
  if (!status.ok()) return status;
  return ToStatus(cudaStreamSynchronize(stream_), "waiting for pages");
}

absl::StatusOr<FenceId> CudaBackend::Fence() {
  if (absl::Status bound = BindThread(); !bound.ok()) return bound;
  if (inputs_.has_kept()) {
    if (absl::Status flushed = Flush(); !flushed.ok()) return flushed;
  }
  const absl::StatusOr<cudaStream_t> stream = outputs_.Join();
  if (!stream.ok()) return stream.status();
  return fences_.Take(*stream);
}

absl::StatusOr<bool> CudaBackend::Passed(FenceId fence) { return fences_.Passed(fence); }

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaOptions& options) {
  return CudaBackend::Make(options);
}

}  // namespace fp8kvd::kernels::cuda
