// The division of a session's memory.
#include "client/cc/arena.h"

#include <map>
#include <random>

#include "gtest/gtest.h"

namespace fp8kvd::client {
namespace {

TEST(Arena, GivesWhatIsLeftAndNoMore) {
  Arena arena(100);
  EXPECT_EQ(arena.Take(60), 0U);
  EXPECT_EQ(arena.Take(41), std::nullopt);
  EXPECT_EQ(arena.Take(40), 60U);
  EXPECT_EQ(arena.Take(1), std::nullopt);
}

TEST(Arena, FreeNeighboursJoin) {
  Arena arena(90);
  for (uint64_t at : {0, 30, 60}) EXPECT_EQ(arena.Take(30), at);
  arena.GiveBack(0, 30);
  arena.GiveBack(60, 30);
  EXPECT_EQ(arena.Take(31), std::nullopt) << "two gaps of 30";
  arena.GiveBack(30, 30);
  EXPECT_EQ(arena.Take(90), 0U);
}

TEST(Arena, PartsNeverOverlap) {
  Arena arena(1000);
  std::map<uint64_t, uint64_t> taken;
  std::minstd_rand random(1);
  for (int i = 0; i < 10'000; ++i) {
    const uint64_t bytes = 1 + random() % 200;
    if (const std::optional<uint64_t> at = arena.Take(bytes); at.has_value()) {
      const auto next = taken.lower_bound(*at);
      ASSERT_TRUE(next == taken.end() || *at + bytes <= next->first);
      ASSERT_TRUE(next == taken.begin() || std::prev(next)->first + std::prev(next)->second <= *at);
      ASSERT_LE(*at + bytes, 1000U);
      taken[*at] = bytes;
    } else {
      ASSERT_FALSE(taken.empty());
      auto any = std::next(taken.begin(), static_cast<int64_t>(random() % taken.size()));
      arena.GiveBack(any->first, any->second);
      taken.erase(any);
    }
  }
  for (const auto& [at, bytes] : taken) arena.GiveBack(at, bytes);
  EXPECT_EQ(arena.Take(1000), 0U);
}

}  // namespace
}  // namespace fp8kvd::client
