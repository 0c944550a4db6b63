// server/rpc/helper_thread.h: one thread for what takes a while and touches no sequence, so that no
// poller is held up. PlanPrecision and MeasureKvError have one each: plans wait for no measurement.
//
// Tenants. Each has a line of its own. Lines that wait take turns, and a turn is one piece of the
//   oldest task of the line: some milliseconds, however large the task is (the largest, the import
//   of a config.json of a mebibyte, takes some 30). So a tenant waits, for each piece of its own,
//   for one of every other tenant at most, whatever those have waiting; and those that always wait
//   get alike turns. (Deficit round robin whose pieces count alike, so that no deficit is kept.)
// Room. What holds much memory from piece to piece takes the room, which one task has at a time;
//   the others' turns pass meanwhile.
// Promises: every task that Run took is continued until it is done, before the destructor returns.
//   Of a tenant at most tasks_per_tenant_max() wait, beside one whose piece is being done.
// Threads: Run from any.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "cache/ids.h"

namespace fp8kvd::rpc {

class HelperThread {
 public:
  // Of all tenants, shared out; a tenant has two at least, so that one waits while one is computed.
  static constexpr size_t kTasksMax = 16;
  static constexpr size_t kTasksPerTenantMin = 2;

  class Task {
   public:
    // Does a piece, some milliseconds of work; true: there is more. After false the thread knows
    // the task no longer.
    virtual bool Continue() = 0;

   protected:
    ~Task() = default;
  };

  explicit HelperThread(int32_t tenants);
  ~HelperThread();
  HelperThread(const HelperThread&) = delete;
  HelperThread& operator=(const HelperThread&) = delete;

  bool Run(Task* task, cache::TenantId tenant);  // false: as many of it wait as may
  // Within Continue alone. False: another has it.
  bool TakeRoom(const void* task);
  void GiveRoomBack() { room_ = nullptr; }
  size_t tasks_per_tenant_max() const { return tasks_per_tenant_max_; }

 private:
  void Loop();
  size_t NextLine() const;

  const size_t tasks_per_tenant_max_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::deque<Task*>> lines_;  // [tenants]; guarded by mutex_, as are the next
  size_t waiting_ = 0;                    // tasks in all lines
  size_t last_line_ = 0;                  // whose turn it was
  bool stop_ = false;
  const void* room_ = nullptr;  // who has it; thread_'s alone
  std::thread thread_;
};

}  // namespace fp8kvd::rpc
