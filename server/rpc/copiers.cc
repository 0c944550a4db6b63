#include "server/rpc/copiers.h"

#include <utility>

namespace fp8kvd::rpc {

Copiers::Copiers(int32_t threads) {
  for (int32_t i = 0; i < threads; ++i) threads_.emplace_back([this] { Loop(); });
}

Copiers::~Copiers() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Copiers::Run(Task* task) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    *last_ = task;
    last_ = &task->next_;
  }
  changed_.notify_one();
}

void Copiers::Loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || first_ != nullptr; });
    if (first_ == nullptr) return;
    Task* const task = first_;
    // Out of the line first: once copied, it may be handed in again before we are back here.
    first_ = std::exchange(task->next_, nullptr);
    if (first_ == nullptr) last_ = &first_;
    lock.unlock();
    task->Copy();
    lock.lock();
  }
}

}  // namespace fp8kvd::rpc
