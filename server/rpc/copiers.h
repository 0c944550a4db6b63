// server/rpc/copiers.h: threads that copy the rows of large messages between gRPC's memory and
// staging. Their poller meanwhile takes in and sends what is next, and calls with small messages
// do not wait behind a copy.
//
// Promises: Copy is called once for each Run; tasks begin in the order of their Runs. No memory is
//   taken. The destructor returns when every task is done.
// Does not manage: how the copied comes back to its poller (job.h).
// Threads: Run from any; one Run of a task at a time.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace fp8kvd::rpc {

class Copiers {
 public:
  // A message, or a reply, with so many bytes of rows is worth the hand-over, some 10 us.
  static constexpr int64_t kBytesMin = int64_t{256} << 10;

  class Task {
   public:
    virtual void Copy() = 0;

   protected:
    virtual ~Task() = default;

   private:
    friend class Copiers;
    Task* next_ = nullptr;
  };

  explicit Copiers(int32_t threads);
  ~Copiers();
  Copiers(const Copiers&) = delete;
  Copiers& operator=(const Copiers&) = delete;

  void Run(Task* task);

 private:
  void Loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  Task* first_ = nullptr;  // guarded by mutex_, as are the next
  Task** last_ = &first_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace fp8kvd::rpc
