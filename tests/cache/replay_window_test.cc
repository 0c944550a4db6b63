#include "cache/replay_window.h"

#include <gtest/gtest.h>

namespace fp8kvd::cache {
namespace {

TEST(ReplayWindow, FindsOnlyTheExactRange) {
  ReplayWindow replay(4);
  replay.Push(0, 4, 10);
  replay.Push(4, 2, 20);
  EXPECT_EQ(replay.Find(4, 2), 20U);
  EXPECT_EQ(replay.Find(0, 4), 10U);
  EXPECT_EQ(replay.Find(4, 1), std::nullopt);
  EXPECT_EQ(replay.Find(1, 3), std::nullopt);
}

TEST(ReplayWindow, ForgetsTheOldestFirst) {
  ReplayWindow replay(3);
  for (int i = 0; i < 7; ++i) replay.Push(i, 1, static_cast<uint64_t>(i));
  EXPECT_EQ(replay.Find(3, 1), std::nullopt);
  for (int i = 4; i < 7; ++i) EXPECT_EQ(replay.Find(i, 1), static_cast<uint64_t>(i));
}

TEST(ReplayWindow, TruncateForgetsWhatReachesPastIt) {
  ReplayWindow replay(3);
  for (int i = 0; i < 5; ++i) replay.Push(2 * i, 2, static_cast<uint64_t>(i));
  replay.Truncate(7);
  EXPECT_EQ(replay.Find(6, 2), std::nullopt);
  EXPECT_EQ(replay.Find(4, 2), 2U);
  replay.Push(7, 1, 9);
  EXPECT_EQ(replay.Find(7, 1), 9U);
}

TEST(ReplayWindow, ACopyKnowsTheSameAndThenGoesItsOwnWay) {
  ReplayWindow parent(2);
  for (int i = 0; i < 3; ++i) parent.Push(i, 1, static_cast<uint64_t>(i));
  ReplayWindow child(2);
  child.CopyFrom(parent);
  child.Push(3, 1, 30);
  EXPECT_EQ(child.Find(2, 1), 2U);
  EXPECT_EQ(parent.Find(3, 1), std::nullopt);
  EXPECT_EQ(parent.Find(1, 1), 1U);
}

}  // namespace
}  // namespace fp8kvd::cache
