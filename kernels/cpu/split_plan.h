// kernels/cpu/split_plan.h: which thread attends to which pages of a launch.
//
// A row's visible pages are cut into splits by a rule of the row alone: at most kSplitsMax of them,
// of at least kSplitPagesMin pages. A unit is one (row, KV head): its splits are attended to one by
// one and merged in their order, whoever computed them. So a row's bits depend neither on the other
// rows nor on the number of threads: on the CPU every launch is batch invariant.
//
// Threads take equal shares of the launch's cost, contiguous in the order (row, KV head, split). A
// unit that lies in the shares of several threads is cut; each leaves its partials, and they are
// merged when all threads are done. A thread begins at most one unit that others end.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/params.h"

namespace fp8kvd::kernels::cpu {

inline constexpr int32_t kSplitsMax = 32;
inline constexpr int32_t kSplitPagesMin = 4;

struct RowSplits {
  int64_t cost_begin = 0;  // of the row in the launch
  int64_t unit_cost = 0;   // of one KV head
  int64_t split_cost = 0;  // of one split but the last
  int32_t first_page = 0;  // visible pages of the row: [first_page, end_page), none if equal
  int32_t end_page = 0;
  int32_t split_pages = 0;  // pages of a split but the last
  int32_t splits = 0;       // >= 1: a row without a visible page is one empty split
};

// Splits [begin, end) of one unit, within one thread's share.
struct UnitPart {
  int32_t row;
  int32_t kv_head;
  int32_t begin;
  int32_t end;
  int32_t owner;  // the thread that begins this unit
  bool whole;     // these are all splits of the unit
};

// One launch at a time. Make allocates nothing within what Reserve took.
class SplitPlan {
 public:
  void Reserve(int32_t rows_max) { rows_.reserve(rows_max); }
  int32_t rows_max() const { return static_cast<int32_t>(rows_.capacity()); }

  // threads: how many could take part, >= 1.
  void Make(const DecodeParams& params, int32_t threads);

  // Threads that do take part: few for a launch too small to be worth waking them.
  int32_t threads() const { return threads_; }
  const RowSplits& row(int32_t index) const { return rows_[index]; }

  // Calls visit(part) for every unit of which thread's share holds some split, in order.
  template <class Visit>
  void ForEachPart(int32_t thread, const DecodeParams& params, const Visit& visit) const {
    const int64_t begin = ShareBegin(thread);
    const int64_t end = ShareBegin(thread + 1);
    for (int32_t row = RowAt(begin); row < static_cast<int32_t>(rows_.size()); ++row) {
      if (rows_[row].cost_begin >= end) break;
      for (int32_t kv_head = 0; kv_head < params.rows[row].kv_heads; ++kv_head) {
        const UnitPart part = PartOf(row, kv_head, begin, end);
        if (part.begin < part.end) visit(part);
      }
    }
  }

 private:
  int64_t ShareBegin(int32_t thread) const { return cost_ * thread / threads_; }
  int32_t OwnerOf(int64_t cost) const;
  int32_t RowAt(int64_t cost) const;
  UnitPart PartOf(int32_t row, int32_t kv_head, int64_t begin, int64_t end) const;

  std::vector<RowSplits> rows_;
  int64_t cost_ = 0;
  int32_t threads_ = 1;
};

}  // namespace fp8kvd::kernels::cpu
