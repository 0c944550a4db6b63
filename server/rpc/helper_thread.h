// server/rpc/helper_thread.h: one thread for what takes milliseconds and touches no sequence
// (PlanPrecision, MeasureKvError), so that no poller is held up.
//
// Promises: every task that Run took is executed, in order, before the destructor returns. At most
//   kTasksMax wait.
// Threads: Run from any.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <thread>

namespace fp8kvd::rpc {

class HelperThread {
 public:
  static constexpr size_t kTasksMax = 16;

  class Task {
   public:
    virtual void Execute() = 0;

   protected:
    ~Task() = default;
  };

  HelperThread();
  ~HelperThread();
  HelperThread(const HelperThread&) = delete;
  HelperThread& operator=(const HelperThread&) = delete;

  bool Run(Task* task);  // false: as many wait as may

 private:
  void Loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task*> tasks_;  // guarded by mutex_
  bool stop_ = false;        // guarded by mutex_
  std::thread thread_;
};

}  // namespace fp8kvd::rpc
