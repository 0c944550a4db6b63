#include "server/engine/worker_pool.h"

#include <array>
#include <atomic>
#include <chrono>
#include <set>
#include <thread>

#include <gtest/gtest.h>

namespace fp8kvd::engine {
namespace {

struct Tally {
  std::array<std::atomic<int>, 16> calls{};
  std::array<std::thread::id, 16> ids{};
};

void Count(void* context, int32_t thread) {
  auto* tally = static_cast<Tally*>(context);
  tally->calls[thread].fetch_add(1, std::memory_order_relaxed);
  tally->ids[thread] = std::this_thread::get_id();
}

TEST(WorkerPool, RunsTheTaskOncePerIndexEachOnAThreadOfItsOwn) {
  for (const int32_t threads : {1, 2, 3, 8}) {
    WorkerPool pool(threads);
    ASSERT_EQ(pool.threads(), threads);
    Tally tally;
    pool.Run(&Count, &tally);
    std::set<std::thread::id> ids;
    for (int32_t i = 0; i < threads; ++i) {
      EXPECT_EQ(tally.calls[i], 1) << i;
      ids.insert(tally.ids[i]);
    }
    EXPECT_EQ(ids.size(), static_cast<size_t>(threads));
    EXPECT_EQ(tally.calls[threads], 0);
  }
}

TEST(WorkerPool, TheCallerIsThreadZero) {
  WorkerPool pool(3);
  Tally tally;
  pool.Run(&Count, &tally);
  EXPECT_EQ(tally.ids[0], std::this_thread::get_id());
}

TEST(WorkerPool, WhatTheTasksWroteIsSeenAfterEachOfManyRuns) {
  constexpr int32_t kThreads = 4;
  WorkerPool pool(kThreads);
  std::array<int64_t, kThreads> sums{};  // plain: Run orders them
  const auto add = [](void* context, int32_t thread) {
    static_cast<int64_t*>(context)[thread] += thread + 1;
  };
  for (int64_t round = 1; round <= 2000; ++round) {
    pool.Run(add, sums.data());
    ASSERT_EQ(sums[0] + sums[1] + sums[2] + sums[3], round * 10);
  }
}

// Long enough for every waiting thread to have stopped spinning and gone to sleep.
void SpinFor(std::chrono::microseconds duration) {
  const auto end = std::chrono::steady_clock::now() + duration;
  while (std::chrono::steady_clock::now() < end) {
  }
}

TEST(WorkerPool, SleepingWorkersWakeForTheNextRun) {
  WorkerPool pool(4);
  Tally tally;
  for (int round = 0; round < 50; ++round) {
    SpinFor(std::chrono::milliseconds(1));
    pool.Run(&Count, &tally);
  }
  for (int32_t i = 0; i < 4; ++i) EXPECT_EQ(tally.calls[i], 50);
}

TEST(WorkerPool, ACallerThatSleptIsWokenByTheLastWorker) {
  WorkerPool pool(3);
  std::atomic<int> slow_runs{0};
  const auto slow = [](void* context, int32_t thread) {
    if (thread == 0) return;
    SpinFor(std::chrono::milliseconds(1));
    static_cast<std::atomic<int>*>(context)->fetch_add(1);
  };
  for (int round = 1; round <= 30; ++round) {
    pool.Run(slow, &slow_runs);
    ASSERT_EQ(slow_runs, 2 * round);
  }
}

TEST(WorkerPool, AnUnusedPoolEnds) { const WorkerPool pool(8); }

}  // namespace
}  // namespace fp8kvd::engine
