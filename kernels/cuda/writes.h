// kernels/cuda/writes.h: what was queued since the last decode that writes what a decode reads, so
// that the next one may read ahead of what it does not touch.
//
// Promises: StateFor never says less than the truth; it says more when it has lost count.
// Threads: one caller at a time. Cost: no allocation once constructed; StateFor sorts the appends.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <span>
#include <vector>

#include "config/base/limits.h"
#include "kernels/cuda/decode_args.h"
#include "kernels/params.h"

namespace fp8kvd::kernels::cuda {

class Writes {
 public:
  Writes() { appends_.reserve(kItemsMax); }

  void Append(std::span<const AppendRow> rows) {
    last_is_tables_ = false;
    if (appends_.size() + rows.size() > kItemsMax) return Other();
    for (const AppendRow& row : rows) appends_.push_back({row.block_table, row.base, row.pos});
  }
  void Tables() {
    last_is_tables_ = true;
    other_ = true;
  }
  void Other() {
    last_is_tables_ = false;
    other_ = true;
  }
  void Decode() {
    last_is_tables_ = other_ = false;
    appends_.clear();
  }

  bool tables_settled() const { return !last_is_tables_; }

  CacheState StateFor(std::span<const DecodeRow> rows) {
    if (other_) return CacheState::kUnsettled;
    if (appends_.empty()) return CacheState::kSettled;
    std::sort(appends_.begin(), appends_.end());
    for (const DecodeRow& row : rows) {
      const Place first = {row.block_table, row.base, 0};
      const auto at = std::lower_bound(appends_.begin(), appends_.end(), first);
      if (at != appends_.end() && at->table == row.block_table && at->base == row.base &&
          at->pos < row.pos) {
        return CacheState::kUnsettled;
      }
    }
    return CacheState::kBelowQueries;
  }

 private:
  struct Place {
    const int32_t* table;
    const uint8_t* base;
    int32_t pos;
    auto operator<=>(const Place&) const = default;
  };

  std::vector<Place> appends_;
  bool other_ = false;
  bool last_is_tables_ = false;
};

}  // namespace fp8kvd::kernels::cuda
