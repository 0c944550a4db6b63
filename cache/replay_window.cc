#include "cache/replay_window.h"

#include <algorithm>

#include "config/base/check.h"

namespace fp8kvd::cache {

ReplayWindow::ReplayWindow(int32_t replay_digests_max)
    : ring_(static_cast<size_t>(replay_digests_max)) {
  FP8KVD_CHECK(replay_digests_max >= 1);
}

const ReplayEntry& ReplayWindow::At(int32_t i) const {
  return ring_[static_cast<size_t>(oldest_ + i) % ring_.size()];
}

void ReplayWindow::Push(int64_t pos, int32_t n, uint64_t digest) {
  const auto kept = static_cast<int32_t>(ring_.size());
  if (count_ == kept) {
    oldest_ = (oldest_ + 1) % kept;
    --count_;
  }
  ring_[static_cast<size_t>(oldest_ + count_) % ring_.size()] = {
      .pos = static_cast<int32_t>(pos), .n = n, .digest = digest};
  ++count_;
}

std::optional<uint64_t> ReplayWindow::Find(int64_t pos, int32_t n) const {
  // Newest first: a retry is nearly always of the last append.
  for (int32_t i = count_ - 1; i >= 0; --i) {
    const ReplayEntry& entry = At(i);
    if (entry.pos == pos && entry.n == n) return entry.digest;
    if (entry.pos < pos) break;
  }
  return std::nullopt;
}

void ReplayWindow::Truncate(int64_t pos) {
  while (count_ > 0 && int64_t{At(count_ - 1).pos} + At(count_ - 1).n > pos) --count_;
}

void ReplayWindow::CopyFrom(const ReplayWindow& other) {
  FP8KVD_CHECK(ring_.size() == other.ring_.size());
  std::copy(other.ring_.begin(), other.ring_.end(), ring_.begin());
  oldest_ = other.oldest_;
  count_ = other.count_;
}

}  // namespace fp8kvd::cache
