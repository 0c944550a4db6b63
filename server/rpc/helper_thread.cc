#include "server/rpc/helper_thread.h"

namespace fp8kvd::rpc {

HelperThread::HelperThread() : thread_([this] { Loop(); }) {}

HelperThread::~HelperThread() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

bool HelperThread::Run(Task* task) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (tasks_.size() >= kTasksMax) return false;
    tasks_.push_back(task);
  }
  changed_.notify_one();
  return true;
}

void HelperThread::Loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    Task* const task = tasks_.front();
    tasks_.pop_front();
    lock.unlock();
    task->Execute();
    lock.lock();
  }
}

}  // namespace fp8kvd::rpc
