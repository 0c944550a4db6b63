// kernels/cuda/step_inputs.h: what a step brings to the device: rows, queries, keys and values; and
// the append, which is one launch with the fetch of the queries.
//
// Promises: an append that was given is on its way before anything that is queued after Flush or
//   Bring returned, or is left to the decode (left_tokens). Until then it is kept back, since the
//   decode that mostly follows adds its queries to the same launch, or takes the tokens itself.
// Does not manage: which decode kernel runs; results (backend.cc).
// Threads: one caller at a time. Cost: no allocation once Init is done.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include <cuda_runtime_api.h>

#include "kernels/cuda/any/append.h"
#include "kernels/cuda/decode_args.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/staging_twins.h"
#include "kernels/cuda/step_path.h"
#include "kernels/cuda/upload_ring.h"
#include "kernels/cuda/writes.h"

namespace fp8kvd::kernels::cuda {

// Of the same sequence and layer.
inline bool IsOfSame(const AppendRow& append, const DecodeRow& row) {
  return append.block_table == row.block_table && append.base == row.base;
}
// The one token that the row's first query stands at.
inline bool IsOf(const AppendRow& append, const DecodeRow& row) {
  return IsOfSame(append, row) && append.n == 1 && append.pos == row.pos;
}
// The row's own token, if the first append is that; then it is taken from the front.
inline NewToken TakeToken(const DecodeRow& row, absl::Span<const AppendRow>& appends) {
  if (appends.empty() || !IsOf(appends.front(), row)) return {};
  const NewToken token = {appends.front().k, appends.front().v};
  appends.remove_prefix(1);
  return token;
}

// Pieces of host memory, neighbours joined.
class HostRanges {
 public:
  HostRanges();
  void Clear();
  void Add(const void* from, int64_t bytes);
  int32_t count() const { return static_cast<int32_t>(ranges_.size()); }
  int64_t bytes() const { return bytes_; }
  int64_t bytes_max() const;
  // to: the twin's address.
  absl::Span<const RangeCopy> ranges() const { return ranges_; }
  // Fills in `to`. False if a range is in no block of staging.
  bool FindTwins(const StagingTwins& twins);

 private:
  std::vector<RangeCopy> ranges_;
  int64_t bytes_ = 0;
};

class StepInputs {
 public:
  StepInputs(const StagingTwins* twins, Writes* writes) : twins_(twins), writes_(writes) {}
  ~StepInputs();
  StepInputs(const StepInputs&) = delete;
  StepInputs& operator=(const StepInputs&) = delete;

  absl::Status Init(cudaStream_t stream);

  absl::Status Append(const AppendParams& params, const StepLimits& limits);
  // The pieces of host memory that an append's rows lie in, with their twins, if it is one of those
  // that would be copied (step_path.h); else none.
  absl::Span<const RangeCopy> RangesToBring(const AppendParams& params, const StepLimits& limits);
  absl::Status Flush(const StepLimits& limits);

  bool has_kept() const { return kept_first_ < kept_rows_.size(); }
  absl::Span<const AppendRow> Kept() const {
    return absl::Span<const AppendRow>(kept_rows_).subspan(kept_first_);
  }
  // Another launch has taken all that was kept.
  void TakeKept() {
    kept_first_ = kept_rows_.size();
    left_tokens_ = false;
  }
  // Whether rows are of one query token, each append kept back is the token of one of them, in
  // their order, and no other row may see it.
  bool KeptAreTokensOf(absl::Span<const DecodeRow> rows);
  // Bring left the appends to the decode, as its tokens.
  bool left_tokens() const { return left_tokens_; }
  // Whether what is kept back can go with a decode of these rows.
  bool Fits(const DecodeParams& params) const {
    return !has_kept() ||
           (kept_.head_dim == params.head_dim && kept_.precision == params.precision);
  }
  // What a step of these decode rows would move, the append kept back included.
  StepSize Measure(absl::Span<const DecodeRow> rows, const DecodeParams& params);
  // Whether each append kept back is of one of the rows, and in their order: then every so many
  // rows need no more appends than so many from the front.
  bool KeptFollows(absl::Span<const DecodeRow> rows) const;
  // Brings the queries of rows by the path, with what was kept back (kNear: the first
  // NearAppends::kMax of it), and sets each row's q to where it will be. Leaves what was kept to a
  // decode that has nothing else to wait for.
  absl::Status Bring(StepPath path, absl::Span<DecodeRow> rows, const DecodeParams& params);

  // A launch's array on its way to the device.
  template <class T>
  absl::StatusOr<const T*> Upload(absl::Span<const T> values);
  // The launch that reads what was uploaded so far is queued.
  void LaunchQueued() { uploads_.LaunchQueued(); }

  template <class T>
  static constexpr int64_t kPerUpload = UploadRing::kSlotBytes / static_cast<int64_t>(sizeof(T));

 private:
  void ListKv(absl::Span<const AppendRow> rows, int32_t head_dim);
  absl::Status CopyIn(const HostRanges& ranges);
  absl::Status LaunchKept(StepPath path);
  void TurnToTwins();

  const StagingTwins* const twins_;
  Writes* const writes_;
  cudaStream_t stream_ = nullptr;
  cudaStream_t copies_ = nullptr;
  cudaEvent_t copied_ = nullptr;
  UploadRing uploads_;

  AppendParams kept_{};  // rows: kept_rows_
  std::vector<AppendRow> kept_rows_;
  size_t kept_first_ = 0;  // those before it were launched
  bool left_tokens_ = false;
  // Rows' sequences and layers, by table and base; room for kItemsMax.
  std::vector<std::pair<const int32_t*, const uint8_t*>> places_;
  HostRanges kv_;
  HostRanges queries_;
};

template <class T>
absl::StatusOr<const T*> StepInputs::Upload(absl::Span<const T> values) {
  absl::StatusOr<uint8_t*> to = uploads_.Next();
  if (!to.ok()) return to.status();
  const int64_t bytes = static_cast<int64_t>(values.size() * sizeof(T));
  std::memcpy(*to, values.data(), bytes);
  absl::StatusOr<const uint8_t*> at = uploads_.Send(bytes);
  if (!at.ok()) return at.status();
  return reinterpret_cast<const T*>(*at);
}

}  // namespace fp8kvd::kernels::cuda
