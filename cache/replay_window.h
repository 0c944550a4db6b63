// cache/replay_window.h: remembers the digests of the latest appends of one (sequence, layer), so
// that a retry is told from other bytes at the same place.
//
// Promises: the latest `replay_digests_max` appends are found by their exact range; older ones are
//   forgotten. Ranges are kept in ascending order, since appends only ever go at the end.
// Does not manage: what a digest is made of (the engine), or the committed length (seq_store.h).
// Threads: one caller at a time. Cost: Find is linear in replay_digests_max, the rest O(1) per
//   entry; no allocation once constructed.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace fp8kvd::cache {

// One append, as it was told.
struct ReplayEntry {
  int32_t pos = 0;  // kSeqLenMax fits
  int32_t n = 0;
  uint64_t digest = 0;
};

class ReplayWindow {
 public:
  explicit ReplayWindow(int32_t replay_digests_max);  // >= 1

  // pos is not below the end of the latest entry.
  void Push(int64_t pos, int32_t n, uint64_t digest);
  // The digest kept for exactly [pos, pos + n).
  std::optional<uint64_t> Find(int64_t pos, int32_t n) const;
  // Forgets every append that reached past pos.
  void Truncate(int64_t pos);
  void Clear() { count_ = 0; }
  // Becomes a copy of other, which keeps as many digests.
  void CopyFrom(const ReplayWindow& other);
  int32_t size() const { return count_; }
  const ReplayEntry& At(int32_t i) const;  // i-th oldest, i < size()

 private:
  std::vector<ReplayEntry> ring_;
  int32_t oldest_ = 0;
  int32_t count_ = 0;
};

}  // namespace fp8kvd::cache
