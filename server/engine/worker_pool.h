// server/engine/worker_pool.h: the fixed threads that CPU kernels run on.
//
// Promises: Run calls the task once per thread index, index 0 on the caller's own thread, and
//   returns when all have returned; what the tasks wrote is then visible to the caller. No
//   allocation in Run.
// Threads: one Run at a time, from one thread. Workers are started by the constructor and joined by
//   the destructor. After work they watch for more for a few microseconds, then sleep: a busy
//   daemon pays no wake-up, an idle one burns no processor.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/workers.h"

namespace fp8kvd::engine {

class WorkerPool final : public kernels::Workers {
 public:
  // threads: those that take part in Run, the caller's included; >= 1.
  explicit WorkerPool(int32_t threads);
  ~WorkerPool() override;
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  int32_t threads() const override { return static_cast<int32_t>(workers_.size()) + 1; }
  void Run(void (*task)(void* context, int32_t thread), void* context) override;

 private:
  void WorkLoop(int32_t thread);
  // Waits until round_ differs from `seen`, and returns it.
  uint64_t AwaitRound(uint64_t seen);
  void AwaitAllDone();

  // One Run is a round. The caller writes task_ and context_, then opens the round; each worker
  // works once per round and counts itself out in pending_. A thread that has spun in vain sleeps
  // on a condition variable, after it has said so under mutex_; the other side looks for sleepers
  // after its change, so none is missed.
  void (*task_)(void*, int32_t) = nullptr;
  void* context_ = nullptr;
  std::atomic<uint64_t> round_{0};
  std::atomic<int32_t> pending_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<int32_t> sleeping_workers_{0};
  std::atomic<bool> caller_sleeps_{false};
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  std::vector<std::thread> workers_;
};

}  // namespace fp8kvd::engine
