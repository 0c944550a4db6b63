#include "server/ops/progress.h"

#include "gtest/gtest.h"

namespace fp8kvd::ops {
namespace {

constexpr int64_t kStalled = Progress::kStalledMs;

engine::EngineStats Holding(int64_t queue_items, uint64_t answered) {
  engine::EngineStats stats;
  stats.queue_items = queue_items;
  stats.requests_answered_total[0] = answered;
  return stats;
}

TEST(Progress, WorkThatWaitsForAMinuteIsAStall) {
  Progress progress;
  progress.Look(1000, Holding(1, 5));
  progress.Look(1000 + kStalled - 1, Holding(1, 5));
  EXPECT_FALSE(progress.is_stalled());
  progress.Look(1000 + kStalled, Holding(1, 5));
  EXPECT_TRUE(progress.is_stalled());
}

TEST(Progress, AnIdleEngineIsNone) {
  Progress progress;
  progress.Look(0, Holding(0, 5));
  progress.Look(10 * kStalled, Holding(0, 5));
  EXPECT_FALSE(progress.is_stalled());
  progress.Look(10 * kStalled + 1, Holding(1, 5));  // new work has a minute of its own
  EXPECT_FALSE(progress.is_stalled());
}

TEST(Progress, SlowOneIsNone) {
  Progress progress;
  for (int64_t i = 0; i < 10; ++i) {
    progress.Look(i * (kStalled - 1), Holding(9, static_cast<uint64_t>(i)));
    EXPECT_FALSE(progress.is_stalled());
  }
}

TEST(Progress, TheFirstLookFindsNoStallWhateverTheClockShows) {
  Progress progress;
  progress.Look(100 * kStalled, Holding(1, 0));  // the first request has just come
  EXPECT_FALSE(progress.is_stalled());
  progress.Look(101 * kStalled, Holding(1, 0));
  EXPECT_TRUE(progress.is_stalled());
}

TEST(Progress, AnswersEndIt) {
  Progress progress;
  progress.Look(0, Holding(1, 5));
  progress.Look(2 * kStalled, Holding(1, 5));
  ASSERT_TRUE(progress.is_stalled());
  progress.Look(2 * kStalled + 1, Holding(1, 6));
  EXPECT_FALSE(progress.is_stalled());
}

}  // namespace
}  // namespace fp8kvd::ops
