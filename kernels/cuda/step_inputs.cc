#include "kernels/cuda/step_inputs.h"

#include <algorithm>

#include "config/base/limits.h"
#include "kernels/cuda/page_layout.h"

namespace fp8kvd::kernels::cuda {
namespace {

// Bytes of a decode row's queries, and of an append row's keys.
int64_t QueryBytes(const DecodeRow& row, const DecodeParams& params) {
  return int64_t{2} * row.q_len * row.kv_heads * params.group * params.head_dim;
}
int64_t KeyBytes(const AppendRow& row, int32_t head_dim) {
  return int64_t{2} * row.n * row.kv_heads * head_dim;
}

int32_t TilesMax(absl::Span<const AppendRow> rows) {
  int32_t tiles_max = 0;
  for (const AppendRow& row : rows) {
    const int32_t tiles = (row.pos + row.n - 1) / kTileTokens - row.pos / kTileTokens + 1;
    tiles_max = std::max(tiles_max, tiles * row.kv_heads);
  }
  return tiles_max;
}

}  // namespace

// A decode row has one range; an append row two.
HostRanges::HostRanges() { ranges_.reserve(int64_t{2} * kItemsMax); }

void HostRanges::Clear() {
  ranges_.clear();
  bytes_ = 0;
}

void HostRanges::Add(const void* from, int64_t bytes) {
  const auto* first = static_cast<const uint8_t*>(from);
  bytes_ += bytes;
  if (!ranges_.empty() && ranges_.back().from + ranges_.back().bytes == first) {
    ranges_.back().bytes += bytes;
    return;
  }
  ranges_.push_back({nullptr, first, bytes});
}

int64_t HostRanges::bytes_max() const {
  int64_t most = 0;
  for (const RangeCopy& range : ranges_) most = std::max(most, range.bytes);
  return most;
}

bool HostRanges::FindTwins(const StagingTwins& twins) {
  return std::all_of(ranges_.begin(), ranges_.end(), [&](RangeCopy& range) {
    range.to = const_cast<uint8_t*>(twins.Of(range.from));
    return range.to != nullptr;
  });
}

StepInputs::~StepInputs() {
  if (copied_ != nullptr) cudaEventDestroy(copied_);
  if (copies_ != nullptr) cudaStreamDestroy(copies_);
}

absl::Status StepInputs::Init(cudaStream_t stream) {
  stream_ = stream;
  kept_rows_.reserve(kItemsMax);
  places_.reserve(kItemsMax);
  absl::Status status =
      ToStatus(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking), "making a stream");
  if (!status.ok()) return status;
  status = ToStatus(cudaEventCreateWithFlags(&copied_, cudaEventDisableTiming), "making an event");
  if (!status.ok()) return status;
  return uploads_.Init(stream);
}

absl::Status StepInputs::Append(const AppendParams& params, const StepLimits& limits) {
  absl::Span<const AppendRow> rows(params.rows, params.rows_count);
  while (!rows.empty()) {
    if (absl::Status status = Flush(limits); !status.ok()) return status;
    const auto some = rows.subspan(0, kItemsMax);
    kept_ = params;
    kept_rows_.assign(some.begin(), some.end());
    kept_first_ = 0;
    rows.remove_prefix(some.size());
  }
  return absl::OkStatus();
}

void StepInputs::ListKv(absl::Span<const AppendRow> rows, int32_t head_dim) {
  kv_.Clear();
  for (const AppendRow& row : rows) kv_.Add(row.k, KeyBytes(row, head_dim));
  for (const AppendRow& row : rows) kv_.Add(row.v, KeyBytes(row, head_dim));
}

absl::Span<const RangeCopy> StepInputs::RangesToBring(const AppendParams& params,
                                                      const StepLimits& limits) {
  if (params.rows_count > kItemsMax) return {};
  ListKv(absl::MakeConstSpan(params.rows, params.rows_count), params.head_dim);
  StepSize size;
  size.kv_ranges = kv_.count();
  size.in_bytes = kv_.bytes();
  if (PathFor(size, limits) != StepPath::kCopied || !kv_.FindTwins(*twins_)) return {};
  return kv_.ranges();
}

absl::Status StepInputs::Flush(const StepLimits& limits) {
  if (!has_kept()) return absl::OkStatus();
  queries_.Clear();
  if (kept_.is_brought) {
    TurnToTwins();
    return LaunchKept(kept_rows_.size() <= NearAppends::kMax ? StepPath::kNear : StepPath::kFetch);
  }
  ListKv(Kept(), kept_.head_dim);
  StepSize size;
  size.kv_ranges = kv_.count();
  size.in_bytes = kv_.bytes();
  StepPath path = PathFor(size, limits);
  if (path == StepPath::kCopied && !kv_.FindTwins(*twins_)) path = StepPath::kFetch;
  if (path == StepPath::kCopied) {
    if (absl::Status status = CopyIn(kv_); !status.ok()) return status;
    TurnToTwins();
  }
  return LaunchKept(path);
}

StepSize StepInputs::Measure(absl::Span<const DecodeRow> rows, const DecodeParams& params) {
  queries_.Clear();
  for (const DecodeRow& row : rows) queries_.Add(row.q, QueryBytes(row, params));
  ListKv(Kept(), kept_.head_dim);
  StepSize size;
  size.rows = static_cast<int32_t>(rows.size());
  size.query_ranges = queries_.count();
  size.kv_ranges = kv_.count();
  size.in_bytes = queries_.bytes() + kv_.bytes();
  const int64_t element = params.out_type == OutType::kFp32 ? 4 : 2;
  size.out_bytes = queries_.bytes() / 2 * element;
  return size;
}

bool StepInputs::KeptFollows(absl::Span<const DecodeRow> rows) const {
  size_t i = 0;
  for (const AppendRow& append : Kept()) {
    while (i < rows.size() && !IsOfSame(append, rows[i])) ++i;
    if (i++ == rows.size()) return false;
  }
  return true;
}

bool StepInputs::KeptAreTokensOf(absl::Span<const DecodeRow> rows) {
  const absl::Span<const AppendRow> appends = Kept();
  size_t appended = 0;
  places_.clear();
  for (const DecodeRow& row : rows) {
    if (row.q_len != 1) return false;
    if (appended < appends.size() && IsOf(appends[appended], row)) ++appended;
    places_.emplace_back(row.block_table, row.base);
  }
  if (appended < appends.size()) return false;
  if (appended == 0) return true;
  std::sort(places_.begin(), places_.end());
  return std::adjacent_find(places_.begin(), places_.end()) == places_.end();
}

absl::Status StepInputs::Bring(StepPath path, absl::Span<DecodeRow> rows,
                               const DecodeParams& params) {
  left_tokens_ = false;
  queries_.Clear();
  for (const DecodeRow& row : rows) queries_.Add(row.q, QueryBytes(row, params));
  if (!queries_.FindTwins(*twins_)) {  // not of ours: kernels read it where it is
    queries_.Clear();
    path = path == StepPath::kCopied ? StepPath::kFetch : path;
  } else {
    for (DecodeRow& row : rows) row.q = twins_->Of(row.q);
  }
  if (path == StepPath::kCopied) {
    ListKv(Kept(), kept_.head_dim);
    const bool has_twins = kv_.FindTwins(*twins_);
    if (has_twins && kv_.count() > 0) {
      if (absl::Status status = CopyIn(kv_); !status.ok()) return status;
      TurnToTwins();
    }
    if (absl::Status status = CopyIn(queries_); !status.ok()) return status;
    queries_.Clear();
    left_tokens_ = has_kept() && !params.batch_invariant && params.group <= NearRows::kColumnsMax &&
                   KeptAreTokensOf(rows);
    if (left_tokens_) return absl::OkStatus();
  }
  if (!has_kept() && queries_.count() == 0) return absl::OkStatus();
  if (!has_kept()) {
    kept_ = AppendParams{};
    kept_.head_dim = params.head_dim;
    kept_.precision = params.precision;
  }
  return LaunchKept(path);
}

// On a stream of its own, so that the copies run beside the launches before.
absl::Status StepInputs::CopyIn(const HostRanges& ranges) {
  for (const RangeCopy& range : ranges.ranges()) {
    const absl::Status status = ToStatus(
        cudaMemcpyAsync(range.to, range.from, range.bytes, cudaMemcpyHostToDevice, copies_),
        "copying a step's rows in");
    if (!status.ok()) return status;
  }
  absl::Status status = ToStatus(cudaEventRecord(copied_, copies_), "recording a copy");
  if (!status.ok()) return status;
  return ToStatus(cudaStreamWaitEvent(stream_, copied_, 0), "waiting for a copy");
}

void StepInputs::TurnToTwins() {
  for (size_t i = kept_first_; i < kept_rows_.size(); ++i) {
    AppendRow& row = kept_rows_[i];
    row.k = twins_->Of(row.k);
    row.v = twins_->Of(row.v);
  }
}

absl::Status StepInputs::LaunchKept(StepPath path) {
  const size_t rows_max = path == StepPath::kNear ? NearAppends::kMax : kept_rows_.size();
  const absl::Span<const AppendRow> rows = Kept().subspan(0, rows_max);
  AppendLaunch launch;
  launch.params = kept_;
  launch.params.rows = nullptr;
  launch.params.rows_count = static_cast<int32_t>(rows.size());
  launch.tiles_max = TilesMax(rows);
  launch.tables_settled = writes_->tables_settled();
  launch.copies_count = queries_.count();
  launch.copy_bytes_max = queries_.bytes_max();
  NearAppends near;
  if (path == StepPath::kNear) {
    std::copy(rows.begin(), rows.end(), near.rows);
    std::copy(queries_.ranges().begin(), queries_.ranges().end(), near.copies);
    launch.near = &near;
  } else {
    const auto at = Upload(rows);
    if (!at.ok()) return at.status();
    launch.params.rows = *at;
    if (launch.copies_count > 0) {
      const auto copies_at = Upload(queries_.ranges());
      if (!copies_at.ok()) return copies_at.status();
      launch.copies = *copies_at;
    }
  }
  const absl::Status status = ToStatus(LaunchAppend(launch, stream_), "appending");
  if (!status.ok()) return status;
  LaunchQueued();
  writes_->Append(rows);
  kept_first_ += rows.size();
  queries_.Clear();
  return absl::OkStatus();
}

}  // namespace fp8kvd::kernels::cuda
