#include "kernels/cuda/backend.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include <cuda_runtime_api.h>

#include "config/base/check.h"
#include "config/base/limits.h"
#include "kernels/cuda/any/append.h"
#include "kernels/cuda/any/copy.h"
#include "kernels/cuda/any/merge.h"
#include "kernels/cuda/decode_table.h"
#include "kernels/cuda/launch_shape.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/page_layout.h"
#include "kernels/cuda/upload_ring.h"
#include "kernels/cuda/writes.h"

namespace fp8kvd::kernels::cuda {
namespace {

// As many of T as one upload carries.
template <class T>
constexpr int64_t kPerUpload = UploadRing::kSlotBytes / static_cast<int64_t>(sizeof(T));
static_assert(kPerUpload<DecodeRow> >= kItemsMax, "the rows of a launch are one upload");

// The largest sum of units that the kernels' 32-bit counters take.
constexpr int64_t kLaunchUnitsMax = (int64_t{1} << 31) - 1;

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
  absl::Status Append(const AppendParams& params) override;
  absl::Status Decode(const DecodeParams& params) override;
  absl::Status Poison(uint8_t* pool_bytes, int64_t bytes) override;
  absl::Status Read(const uint8_t* pool_bytes, absl::Span<uint8_t> host) override;
  absl::Status Write(uint8_t* pool_bytes, absl::Span<const uint8_t> host) override;

  absl::StatusOr<FenceId> Fence() override;
  absl::StatusOr<bool> Passed(FenceId fence) override;
  int64_t allocations() const override { return allocations_; }

 private:
  static constexpr int32_t kFences = 256;

  explicit CudaBackend(const CudaOptions& options) : options_(options) {}
  absl::Status Init();

  // Makes our device the calling thread's: CUDA keeps that by thread, and calls may come from any,
  // one at a time. Costs a comparison once a thread is bound.
  absl::Status BindThread() const;

  // A launch's array on its way to the device.
  template <class T>
  absl::StatusOr<const T*> Upload(absl::Span<const T> values);

  absl::Status NoKernel(const KernelShape& shape) const;
  // Items of a launch; with batch_invariant each leaves a piece.
  int64_t ItemsMax(const DecodeKernel& kernel, bool batch_invariant) const;
  // How many rows from the front one launch takes; at least one.
  int64_t RowsOfLaunch(absl::Span<const DecodeRow> rows, const DecodeParams& params,
                       const DecodeKernel& kernel) const;
  absl::Status DecodeRows(absl::Span<const DecodeRow> rows, const DecodeParams& params,
                          const DecodeKernel& kernel);

  const CudaOptions options_;
  int32_t sm_ = 80;  // rows of the table that are used
  cudaDeviceProp properties_{};
  DeviceLimits limits_{};
  cudaStream_t stream_ = nullptr;
  UploadRing uploads_;
  int64_t allocations_ = 0;
  std::vector<DeviceBytes> device_memory_;
  std::vector<PinnedBytes> pinned_memory_;

  DeviceBytes pieces_;
  int64_t piece_floats_ = 0;  // room in pieces_
  DeviceBytes arrivals_;
  DeviceBytes row_items_;
  Writes writes_;
  std::vector<DecodeRow> sorted_rows_;  // room for kItemsMax

  std::array<cudaEvent_t, kFences> fences_{};
  uint64_t fences_taken_ = 0;
  uint64_t fences_passed_ = 0;
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
                                      " are here; set device_index to one of them");
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
  limits_ = {properties_.multiProcessorCount,
             static_cast<int32_t>(properties_.sharedMemPerMultiprocessor),
             static_cast<int32_t>(properties_.sharedMemPerBlockOptin)};
  status = ToStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
  if (!status.ok()) return status;
  for (cudaEvent_t& event : fences_) {
    status = ToStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
    if (!status.ok()) return status;
  }
  sorted_rows_.reserve(kItemsMax);
  ++allocations_;
  return uploads_.Init(stream_);
}

CudaBackend::~CudaBackend() {
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);
  for (cudaEvent_t event : fences_) {
    if (event != nullptr) cudaEventDestroy(event);
  }
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
  if (cudaMemGetInfo(&free, &total) == cudaSuccess) {
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
  auto memory = AllocPinned(bytes);
  if (!memory.ok()) return memory.status();
  ++allocations_;
  pinned_memory_.push_back(*std::move(memory));
  return pinned_memory_.back().get();
}

absl::Status CudaBackend::NoKernel(const KernelShape& shape) const {
  std::string known;
  for (const DecodeKernel& kernel : DecodeTable()) {
    const std::string dim = std::to_string(kernel.head_dim);
    if (kernel.sm == sm_ && known.find(dim) == std::string::npos) known += " " + dim;
  }
  return absl::UnimplementedError("no kernel for head_dim " + std::to_string(shape.head_dim) +
                                  ", group " + std::to_string(shape.group) +
                                  "; there are kernels for head_dim" + known + ", groups 1 to " +
                                  std::to_string(kGroupMax));
}

absl::Status CudaBackend::WarmUp(absl::Span<const KernelShape> shapes, int32_t rows_max,
                                 int32_t q_len_max, int32_t q_heads_max) {
  FP8KVD_CHECK(rows_max <= kItemsMax);
  int64_t floats = 0;
  for (const KernelShape& shape : shapes) {
    const DecodeKernel* any = FindDecodeKernel(sm_, shape.precision, shape.head_dim, 1);
    if (any == nullptr || shape.group < 1 || shape.group > kGroupMax) return NoKernel(shape);
    for (const DecodeKernel& kernel : DecodeTable()) {
      if (kernel.sm != sm_ || kernel.precision != shape.precision ||
          kernel.head_dim != shape.head_dim) {
        continue;
      }
      const absl::Status status =
          ToStatus(kernel.prepare(limits_.shared_per_cta), "loading a decode kernel");
      if (!status.ok()) return status;
      const int32_t blocks = CeilDiv(q_len_max * shape.group, kernel.grain.columns);
      const int64_t kv_heads = q_heads_max / shape.group;
      const int64_t pieces =
          std::max(ShapePiecesMax(limits_), kv_heads * (int64_t{kInvariantItemsMax} + blocks));
      floats = std::max(floats, pieces * PieceFloats(kernel.grain.columns, kernel.head_dim));
    }
  }
  if (floats > piece_floats_) {
    auto pieces = AllocDevice(floats * int64_t{sizeof(float)});
    if (!pieces.ok()) return pieces.status();
    pieces_ = *std::move(pieces);
    piece_floats_ = floats;
    ++allocations_;
  }
  if (arrivals_ == nullptr) {
    auto arrivals = AllocDevice(int64_t{ShapeCtasMax(limits_)} * 4);
    if (!arrivals.ok()) return arrivals.status();
    arrivals_ = *std::move(arrivals);
    auto row_items = AllocDevice(int64_t{kItemsMax} * 4);
    if (!row_items.ok()) return row_items.status();
    row_items_ = *std::move(row_items);
    allocations_ += 2;
  }
  return ToStatus(cudaDeviceSynchronize(), "warming up");
}

template <class T>
absl::StatusOr<const T*> CudaBackend::Upload(absl::Span<const T> values) {
  absl::StatusOr<uint8_t*> to = uploads_.Next();
  if (!to.ok()) return to.status();
  const int64_t bytes = static_cast<int64_t>(values.size() * sizeof(T));
  std::memcpy(*to, values.data(), bytes);
  absl::StatusOr<const uint8_t*> at = uploads_.Send(bytes);
  if (!at.ok()) return at.status();
  return reinterpret_cast<const T*>(*at);
}

absl::Status CudaBackend::UpdateTables(absl::Span<const TableEdit> edits) {
  if (absl::Status bound = BindThread(); !bound.ok()) return bound;
  while (!edits.empty()) {
    const auto some = edits.subspan(0, kPerUpload<TableEdit>);
    const auto at = Upload(some);
    if (!at.ok()) return at.status();
    const absl::Status status = ToStatus(
        LaunchTableEdits(*at, static_cast<int32_t>(some.size()), stream_), "editing block tables");
    if (!status.ok()) return status;
    edits.remove_prefix(some.size());
    writes_.Tables();
  }
  return absl::OkStatus();
}

absl::Status CudaBackend::CopyPages(absl::Span<const PageCopy> copies) {
  if (absl::Status bound = BindThread(); !bound.ok()) return bound;
  while (!copies.empty()) {
    const auto some = copies.subspan(0, kPerUpload<PageCopy>);
    const auto at = Upload(some);
    if (!at.ok()) return at.status();
    int64_t bytes_max = 0;
    for (const PageCopy& copy : some) bytes_max = std::max(bytes_max, copy.bytes);
    const absl::Status status =
        ToStatus(LaunchCopyPages(*at, static_cast<int32_t>(some.size()), bytes_max, stream_),
                 "copying pages");
    if (!status.ok()) return status;
    copies.remove_prefix(some.size());
    writes_.Other();
  }
  return absl::OkStatus();
}

absl::Status CudaBackend::Append(const AppendParams& params) {
  if (absl::Status bound = BindThread(); !bound.ok()) return bound;
  absl::Span<const AppendRow> rows(params.rows, params.rows_count);
  while (!rows.empty()) {
    const auto some = rows.subspan(0, kPerUpload<AppendRow>);
    const auto at = Upload(some);
    if (!at.ok()) return at.status();
    int32_t tiles_max = 0;
    for (const AppendRow& row : some) {
      const int32_t tiles = (row.pos + row.n - 1) / kTileTokens - row.pos / kTileTokens + 1;
      tiles_max = std::max(tiles_max, tiles * row.kv_heads);
    }
    const AppendParams on_device = {*at, static_cast<int32_t>(some.size()), params.head_dim,
                                    params.precision};
    const absl::Status status = ToStatus(
        LaunchAppend(on_device, tiles_max, writes_.tables_settled(), stream_), "appending");
    if (!status.ok()) return status;
    rows.remove_prefix(some.size());
    writes_.Append(some);
  }
  return absl::OkStatus();
}

absl::Status CudaBackend::Decode(const DecodeParams& params) {
  if (absl::Status bound = BindThread(); !bound.ok()) return bound;
  const absl::Span<const DecodeRow> rows(params.rows, params.rows_count);
  int32_t columns_max = 0;
  for (const DecodeRow& row : rows) columns_max = std::max(columns_max, row.q_len * params.group);
  const auto kernel_for = [&](int32_t columns) {
    return FindDecodeKernel(sm_, params.precision, params.head_dim, columns);
  };
  if (kernel_for(columns_max) == nullptr) {
    return NoKernel({params.head_dim, params.group, params.precision});
  }
  if (!params.batch_invariant) return DecodeRows(rows, params, *kernel_for(columns_max));
  // Which kernel a row gets must follow from the row alone, so there is a launch for each.
  for (const DecodeKernel& kernel : DecodeTable()) {
    sorted_rows_.clear();
    for (const DecodeRow& row : rows) {
      if (kernel_for(row.q_len * params.group) == &kernel) sorted_rows_.push_back(row);
    }
    const absl::Status status = DecodeRows(sorted_rows_, params, kernel);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

int64_t CudaBackend::ItemsMax(const DecodeKernel& kernel, bool batch_invariant) const {
  return batch_invariant ? piece_floats_ / PieceFloats(kernel.grain.columns, kernel.head_dim)
                         : kLaunchUnitsMax;
}

int64_t CudaBackend::RowsOfLaunch(absl::Span<const DecodeRow> rows, const DecodeParams& params,
                                  const DecodeKernel& kernel) const {
  const int64_t items_max = ItemsMax(kernel, params.batch_invariant);
  int64_t units = 0;
  int64_t items = 0;
  int64_t count = 0;
  for (const DecodeRow& row : rows.subspan(0, kItemsMax)) {
    const LaunchWork work = WorkOfRows(absl::MakeConstSpan(&row, 1), params.group, kernel.grain,
                                       params.batch_invariant);
    units += work.units;
    items += work.items;
    if (count > 0 && (units > kLaunchUnitsMax || items > items_max)) break;
    ++count;
  }
  return count;
}

absl::Status CudaBackend::DecodeRows(absl::Span<const DecodeRow> rows, const DecodeParams& params,
                                     const DecodeKernel& kernel) {
  while (!rows.empty()) {
    const auto some = rows.subspan(0, RowsOfLaunch(rows, params, kernel));
    const auto at = Upload(some);
    if (!at.ok()) return at.status();
    DecodeArgs args{};
    args.rows = *at;
    args.rows_count = static_cast<int32_t>(some.size());
    args.group = params.group;
    args.group_inverse = GroupInverse(params.group);
    args.out_type = params.out_type;
    args.batch_invariant = params.batch_invariant;
    args.cache = writes_.StateFor(some);
    args.pieces = reinterpret_cast<float*>(pieces_.get());
    args.arrivals = reinterpret_cast<uint32_t*>(arrivals_.get());
    args.row_items = reinterpret_cast<int32_t*>(row_items_.get());
    const LaunchWork work = WorkOfRows(some, params.group, kernel.grain, params.batch_invariant);
    const int64_t items_max = ItemsMax(kernel, params.batch_invariant);
    if (work.units > kLaunchUnitsMax || work.items > items_max) {
      return absl::InvalidArgumentError("a row of " + std::to_string(work.items) +
                                        " items, one launch takes " + std::to_string(items_max) +
                                        " after WarmUp; ask for fewer query tokens at once");
    }
    const LaunchShape shape = ShapeFor(kernel, limits_, args.rows_count, work);
    absl::Status status = ToStatus(kernel.launch(args, shape, stream_), "decoding");
    if (status.ok() && params.batch_invariant) {
      int32_t columns_max = 0;
      for (const DecodeRow& row : some) {
        columns_max = std::max(columns_max, row.q_len * row.kv_heads * params.group);
      }
      status = ToStatus(
          LaunchMerge(args, params.precision, params.head_dim, kernel.grain, columns_max, stream_),
          "merging");
    }
    if (!status.ok()) return status;
    writes_.Decode();
    rows.remove_prefix(some.size());
  }
  return absl::OkStatus();
}

absl::Status CudaBackend::Poison(uint8_t* pool_bytes, int64_t bytes) {
  if (absl::Status bound = BindThread(); !bound.ok()) return bound;
  writes_.Other();
  return ToStatus(cudaMemsetAsync(pool_bytes, 0xFF, bytes, stream_), "poisoning pages");
}

absl::Status CudaBackend::Read(const uint8_t* pool_bytes, absl::Span<uint8_t> host) {
  if (absl::Status bound = BindThread(); !bound.ok()) return bound;
  const absl::Status status = ToStatus(
      cudaMemcpyAsync(host.data(), pool_bytes, host.size(), cudaMemcpyDeviceToHost, stream_),
      "reading pages");
  if (!status.ok()) return status;
  return ToStatus(cudaStreamSynchronize(stream_), "waiting for pages");
}

absl::Status CudaBackend::Write(uint8_t* pool_bytes, absl::Span<const uint8_t> host) {
  if (absl::Status bound = BindThread(); !bound.ok()) return bound;
  writes_.Other();
  const absl::Status status = ToStatus(
      cudaMemcpyAsync(pool_bytes, host.data(), host.size(), cudaMemcpyHostToDevice, stream_),
      "writing pages");
  if (!status.ok()) return status;
  return ToStatus(cudaStreamSynchronize(stream_), "waiting for pages");
}

absl::StatusOr<FenceId> CudaBackend::Fence() {
  if (absl::Status bound = BindThread(); !bound.ok()) return bound;
  const uint64_t fence = fences_taken_ + 1;
  const cudaEvent_t event = fences_[fence % kFences];
  if (fence > kFences && fences_passed_ < fence - kFences) {
    const absl::Status status =
        ToStatus(cudaEventSynchronize(event), "waiting for a fence of long ago");
    if (!status.ok()) return status;
    fences_passed_ = fence - kFences;
  }
  const absl::Status status = ToStatus(cudaEventRecord(event, stream_), "setting a fence");
  if (!status.ok()) return status;
  fences_taken_ = fence;
  return FenceId{fence};
}

absl::StatusOr<bool> CudaBackend::Passed(FenceId fence) {
  if (fence.value <= fences_passed_) return true;
  const cudaError_t error = cudaEventQuery(fences_[fence.value % kFences]);
  if (error == cudaErrorNotReady) return false;
  const absl::Status status = ToStatus(error, "asking for a fence");
  if (!status.ok()) return status;
  fences_passed_ = fence.value;
  return true;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaOptions& options) {
  return CudaBackend::Make(options);
}

}  // namespace fp8kvd::kernels::cuda
