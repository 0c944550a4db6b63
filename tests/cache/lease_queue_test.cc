#include "cache/lease_queue.h"

#include <map>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace fp8kvd::cache {
namespace {

std::vector<uint32_t> Ended(LeaseQueue& queue, int64_t now_ms, int32_t steps = 1000) {
  std::vector<uint32_t> seqs;
  SeqIndex seq{0};
  while (queue.PopEnded(now_ms, &steps, &seq)) seqs.push_back(static_cast<uint32_t>(seq));
  return seqs;
}

TEST(LeaseQueue, GivesWhatEndedInTheOrderOfTheEnds) {
  LeaseQueue queue(4);
  queue.Set(SeqIndex{0}, 30);
  queue.Set(SeqIndex{1}, 10);
  queue.Set(SeqIndex{2}, 20);
  queue.Set(SeqIndex{3}, 21);
  EXPECT_EQ(Ended(queue, 20), (std::vector<uint32_t>{1, 2}));
}

TEST(LeaseQueue, ALaterEndCounts) {
  LeaseQueue queue(2);
  queue.Set(SeqIndex{0}, 10);
  queue.Set(SeqIndex{0}, 50);
  EXPECT_TRUE(Ended(queue, 49).empty());
  EXPECT_EQ(Ended(queue, 50), std::vector<uint32_t>{0});
}

TEST(LeaseQueue, AnEarlierEndCounts) {
  LeaseQueue queue(2);
  queue.Set(SeqIndex{0}, 10);
  queue.Set(SeqIndex{1}, 50);
  queue.Set(SeqIndex{1}, 5);
  EXPECT_EQ(Ended(queue, 5), std::vector<uint32_t>{1});
}

TEST(LeaseQueue, WhatIsRemovedNeverEnds) {
  LeaseQueue queue(2);
  queue.Set(SeqIndex{0}, 10);
  queue.Remove(SeqIndex{0});
  queue.Remove(SeqIndex{1});
  EXPECT_TRUE(Ended(queue, 100).empty());
}

TEST(LeaseQueue, TakesNoMoreStepsThanItIsGiven) {
  LeaseQueue queue(8);
  for (uint32_t i = 0; i < 8; ++i) queue.Set(SeqIndex{i}, 10);
  EXPECT_EQ(Ended(queue, 10, 3).size(), 3U);
  EXPECT_EQ(Ended(queue, 10).size(), 5U);
}

// Against a map from sequence to end, by a fixed seed.
TEST(LeaseQueue, AgreesWithAMapOverRandomCalls) {
  constexpr uint32_t kSeqs = 50;
  std::mt19937 random(1);
  LeaseQueue queue(kSeqs);
  std::map<uint32_t, int64_t> ends;
  int64_t now_ms = 0;
  for (int i = 0; i < 20000; ++i) {
    const uint32_t seq = random() % kSeqs;
    if (random() % 8 == 0) {
      queue.Remove(SeqIndex{seq});
      ends.erase(seq);
    } else {
      ends[seq] = now_ms + random() % 200;
      queue.Set(SeqIndex{seq}, ends[seq]);
    }
    now_ms += random() % 5;
    for (const uint32_t ended : Ended(queue, now_ms)) {
      ASSERT_EQ(ends.count(ended), 1U);
      ASSERT_LE(ends[ended], now_ms);
      ends.erase(ended);
    }
    for (const auto& [left, end_ms] : ends) ASSERT_GT(end_ms, now_ms) << left << " was forgotten";
  }
}

}  // namespace
}  // namespace fp8kvd::cache
