#include "server/rpc/helper_thread.h"

#include <algorithm>

namespace fp8kvd::rpc {

HelperThread::HelperThread(int32_t tenants)
    : tasks_per_tenant_max_(
          std::max(kTasksPerTenantMin, kTasksMax / static_cast<size_t>(std::max(tenants, 1)))),
      lines_(static_cast<size_t>(std::max(tenants, 1))),
      thread_([this] { Loop(); }) {}

HelperThread::~HelperThread() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

bool HelperThread::Run(Task* task, cache::TenantId tenant) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::deque<Task*>& line = lines_[static_cast<uint32_t>(tenant)];
    if (line.size() >= tasks_per_tenant_max_) return false;
    line.push_back(task);
    ++waiting_;
  }
  changed_.notify_one();
  return true;
}

bool HelperThread::TakeRoom(const void* task) {
  if (room_ == nullptr) room_ = task;
  return room_ == task;
}

// One after the last that had a turn; waiting_ > 0.
size_t HelperThread::NextLine() const {
  size_t line = last_line_;
  do {
    line = (line + 1) % lines_.size();
  } while (lines_[line].empty());
  return line;
}

void HelperThread::Loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || waiting_ > 0; });
    if (waiting_ == 0) return;
    last_line_ = NextLine();
    std::deque<Task*>& line = lines_[last_line_];
    Task* const task = line.front();
    // Out of the line first: once done, it may be handed in again before we are back here.
    line.pop_front();
    --waiting_;
    lock.unlock();
    const bool has_more = task->Continue();
    lock.lock();
    if (!has_more) continue;
    line.push_front(task);
    ++waiting_;
  }
}

}  // namespace fp8kvd::rpc
