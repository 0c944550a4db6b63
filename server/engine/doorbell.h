// server/engine/doorbell.h: wakes one sleeping thread, and costs the ringer one load while it is
// awake.
//
// Promises: a Ring that comes after its cause was made visible is never lost: Sleep looks for work
//   once more after it has announced that it sleeps, and Ring looks for a sleeper after the cause.
// Threads: one sleeper, any ringers.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace fp8kvd::engine {

class Doorbell {
 public:
  void Ring() {
    if (!is_asleep_.load(std::memory_order_seq_cst)) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_asleep_.store(false, std::memory_order_seq_cst);
    }
    rung_.notify_one();
  }

  // Sleeps until Ring, `sleep_us_max` microseconds at most. has_work(): whether to stay awake.
  template <typename HasWork>
  void Sleep(int64_t sleep_us_max, const HasWork& has_work) {
    std::unique_lock<std::mutex> lock(mutex_);
    is_asleep_.store(true, std::memory_order_seq_cst);
    if (!has_work()) {
      rung_.wait_for(lock, std::chrono::microseconds(sleep_us_max),
                     [this] { return !is_asleep_.load(std::memory_order_seq_cst); });
    }
    is_asleep_.store(false, std::memory_order_seq_cst);
  }

 private:
  std::atomic<bool> is_asleep_{false};
  std::mutex mutex_;
  std::condition_variable rung_;
};

}  // namespace fp8kvd::engine
