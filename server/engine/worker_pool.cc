#include "server/engine/worker_pool.h"

#include "config/base/check.h"

namespace fp8kvd::engine {
namespace {

// About 20 us on today's processors: longer than the gap between two launches of a busy engine, far
// shorter than a scheduler's time slice.
constexpr int kSpins = 2000;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins for a while; true as soon as ready() is.
template <class Ready>
bool Spin(const Ready& ready) {
  for (int i = 0; i < kSpins; ++i) {
    if (ready()) return true;
    Pause();
  }
  return false;
}

}  // namespace

WorkerPool::WorkerPool(int32_t threads) {
  FP8KVD_CHECK(threads >= 1);
  workers_.reserve(threads - 1);
  for (int32_t thread = 1; thread < threads; ++thread) {
    workers_.emplace_back([this, thread] { WorkLoop(thread); });
  }
}

WorkerPool::~WorkerPool() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_.store(true);
    round_.fetch_add(1);
  }
  work_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void WorkerPool::Run(void (*task)(void* context, int32_t thread), void* context) {
  task_ = task;
  context_ = context;
  pending_.store(static_cast<int32_t>(workers_.size()));
  round_.fetch_add(1);
  if (sleeping_workers_.load() > 0) {
    { const std::lock_guard<std::mutex> lock(mutex_); }  // who is about to sleep sleeps, then wakes
    work_.notify_all();
  }
  task(context, 0);
  AwaitAllDone();
}

void WorkerPool::AwaitAllDone() {
  const auto all_done = [this] { return pending_.load() == 0; };
  if (Spin(all_done)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  caller_sleeps_.store(true);
  done_.wait(lock, all_done);
  caller_sleeps_.store(false);
}

uint64_t WorkerPool::AwaitRound(uint64_t seen) {
  const auto opened = [this, seen] { return round_.load() != seen; };
  if (!Spin(opened)) {
    std::unique_lock<std::mutex> lock(mutex_);
    sleeping_workers_.fetch_add(1);
    work_.wait(lock, opened);
    sleeping_workers_.fetch_sub(1);
  }
  return round_.load();
}

void WorkerPool::WorkLoop(int32_t thread) {
  uint64_t round = 0;
  for (;;) {
    round = AwaitRound(round);
    if (stopping_.load()) return;
    task_(context_, thread);
    if (pending_.fetch_sub(1) == 1 && caller_sleeps_.load()) {
      { const std::lock_guard<std::mutex> lock(mutex_); }
      done_.notify_one();
    }
  }
}

}  // namespace fp8kvd::engine
