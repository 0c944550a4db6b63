// server/ops/progress.h: whether the engine gets on: work that waits while nothing is launched or
// answered for kStalledMs is a fault that only a new process mends (a hung device, a bug of ours).
//
// Does not manage: what follows (the watchdog of notify.h, /livez).
// Threads: one for Look, any for is_stalled.
#pragma once

#include <atomic>
#include <cstdint>

#include "server/engine/stats.h"

namespace fp8kvd::ops {

class Progress {
 public:
  // No launch takes as long: a CPU's are bounded to milliseconds, a GPU's to less.
  static constexpr int64_t kStalledMs = 60000;

  // At every look, by a clock that only moves forward.
  void Look(int64_t now_ms, const engine::EngineStats& stats) {
    uint64_t done = stats.decode_launches_total + stats.append_slices_total;
    for (const uint64_t answered : stats.requests_answered_total) done += answered;
    if (done != done_ || stats.queue_items == 0 || !has_looked_) moved_ms_ = now_ms;
    has_looked_ = true;
    done_ = done;
    is_stalled_ = now_ms - moved_ms_ >= kStalledMs;
  }
  bool is_stalled() const { return is_stalled_; }

 private:
  bool has_looked_ = false;
  uint64_t done_ = 0;
  int64_t moved_ms_ = 0;
  std::atomic<bool> is_stalled_{false};
};

}  // namespace fp8kvd::ops
