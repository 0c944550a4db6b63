// The bound of a launch by KV bytes: what it takes, what it passes over, and how long a short
// sequence waits beside long ones.
#include <algorithm>
#include <memory>
#include <vector>

#include "gtest/gtest.h"

#include "tests/engine/rig.h"

namespace fp8kvd::testing {
namespace {

using Kind = FakeBackend::Record::Kind;
using Launch = std::vector<int32_t>;  // the positions of its rows

constexpr int64_t kTokenBytes = 16;  // of K and V, as MakeModel has them

// 0: the engine's own bound for the device.
RigOptions Bounded(int64_t kv_tokens_max) {
  RigOptions options;
  options.engine.launches_inflight_max = 1;
  options.engine.batch_kv_bytes_max = kv_tokens_max * kTokenBytes;
  options.engine.staging_bytes = int64_t{64} << 20;
  options.models = {ModelSpec{.windows = {0}, .pages = 512}};
  options.cache.seqs_max = 64;
  return options;
}

// A sequence of so many tokens.
cache::SeqHandle Seq(Rig& rig, int32_t tokens) {
  const cache::SeqHandle seq = rig.Create();
  rig.Fill(seq, 0, tokens);
  return seq;
}

// What becomes of calls of one item each that all wait when the device is free.
std::vector<Launch> LaunchesOf(Rig& rig, const std::vector<ItemSpec>& items) {
  const cache::SeqHandle seq = Seq(rig, 1);
  rig.backend.ForgetRecords();
  rig.backend.Hold();
  DecodeCall running(rig.engine, 0, 0, {Ask(seq, 0, 1)});
  rig.Run(running);
  std::vector<std::unique_ptr<DecodeCall>> calls;
  for (const ItemSpec& item : items) {
    calls.push_back(std::make_unique<DecodeCall>(rig.engine, 0, 0, std::vector{item}));
    rig.Run(*calls.back());
  }
  rig.backend.Release();
  rig.Settle();
  for (const auto& call : calls) EXPECT_TRUE(call->done() && call->items[0].status.ok());
  std::vector<Launch> launches;
  for (const FakeBackend::Record& record : rig.backend.RecordsOf(Kind::kDecode)) {
    launches.push_back(record.positions);
  }
  launches.erase(launches.begin());
  return launches;
}

TEST(KvBytes, AShortItemPassesLongOnesThatFindNoRoom) {
  Rig rig(Bounded(100));
  const std::vector<Launch> launches =
      LaunchesOf(rig, {Ask(Seq(rig, 201), 200, 1), Ask(Seq(rig, 202), 201, 2),
                       Ask(Seq(rig, 203), 202, 3), Ask(Seq(rig, 4), 3, 4)});
  EXPECT_EQ(launches, (std::vector<Launch>{{200, 3}, {201}, {202}}));
}

TEST(KvBytes, AnItemJoinsWhileFourOfItsSizeWouldFit) {
  Rig rig(Bounded(100));
  // 25 of 100; 18 of the 75 left, not 19; 14 of 57.
  const std::vector<Launch> launches = LaunchesOf(
      rig, {Ask(Seq(rig, 300), 299, 1), Ask(Seq(rig, 25), 24, 2), Ask(Seq(rig, 19), 18, 3),
            Ask(Seq(rig, 18), 17, 4), Ask(Seq(rig, 14), 13, 5)});
  EXPECT_EQ(launches, (std::vector<Launch>{{299, 24, 17, 13}, {18}}));
}

TEST(KvBytes, EveryQueryTokenOfAnItemCounts) {
  Rig rig(Bounded(100));
  ItemSpec two = Ask(Seq(rig, 20), 18, 2);
  two.queries = {2, 3};
  const std::vector<Launch> launches =
      LaunchesOf(rig, {Ask(Seq(rig, 300), 299, 1), two, Ask(Seq(rig, 20), 19, 4)});
  EXPECT_EQ(launches, (std::vector<Launch>{{299, 19}, {18}}));
}

TEST(KvBytes, AWindowedItemCountsWhatItsWindowShows) {
  RigOptions options = Bounded(100);
  options.models[0].windows = {20};
  options.cache.reclaim_slack_tokens = 300;
  Rig rig(options);
  const std::vector<Launch> launches =
      LaunchesOf(rig, {Ask(Seq(rig, 300), 299, 1), Ask(Seq(rig, 250), 249, 2)});
  EXPECT_EQ(launches, (std::vector<Launch>{{299, 249}}));
}

TEST(KvBytes, WhatIsPassedOverKeepsItsPlaceBeforeYoungerWorkOnItsSequence) {
  Rig rig(Bounded(100));
  const cache::SeqHandle seq = Seq(rig, 200);
  const std::vector<Launch> launches = LaunchesOf(
      rig, {Ask(Seq(rig, 301), 300, 1), Step(seq, 200, 7), Ask(seq, 0, 3), Ask(Seq(rig, 2), 1, 4)});
  EXPECT_EQ(launches, (std::vector<Launch>{{300, 1}, {200, 0}}));
}

TEST(KvBytes, WhereSomeFindNoRoomTheOthersDoNotWaitForCompany) {
  RigOptions options = Bounded(100);
  options.engine.batch_wait_us_max = 1000;
  Rig rig(options);
  const cache::SeqHandle longer = Seq(rig, 300);
  const cache::SeqHandle other = Seq(rig, 299);
  rig.backend.ForgetRecords();
  DecodeCall both(rig.engine, 0, 0, {Ask(longer, 299, 1), Ask(other, 298, 2)});
  both.request.arrived = rig.clock.NowUs();
  rig.Run(both);
  EXPECT_EQ(rig.backend.RecordsOf(Kind::kDecode).size(), 1u);  // the second may find company
  rig.clock.AdvanceUs(1000);
  rig.Settle();
  EXPECT_TRUE(both.done());
}

TEST(KvBytes, ADeviceThatReturnsAtOnceHasNoBoundUnlessOneIsConfigured) {
  for (const auto& [returns_at_once, kv_tokens_max, launches_wanted] :
       {std::tuple(true, 0, 1), std::tuple(true, 100, 2), std::tuple(false, 100, 2)}) {
    RigOptions options = Bounded(kv_tokens_max);
    options.returns_at_once = returns_at_once;
    Rig rig(options);
    const std::vector<Launch> launches =
        LaunchesOf(rig, {Ask(Seq(rig, 300), 299, 1), Ask(Seq(rig, 299), 298, 2)});
    EXPECT_EQ(launches.size(), launches_wanted) << returns_at_once << kv_tokens_max;
  }
}

// 8 MiB for its one thread: a row of 2 MiB joins, one of more does not.
TEST(KvBytes, ADeviceThatWorksInsideTheCallHasABoundOfItsOwn) {
  RigOptions options = Bounded(0);
  options.cache.seq_len_max = 1 << 18;
  options.models[0].pages = 3 << 12;
  options.engine.append_slice_bytes_max = 1 << 20;
  Rig rig(options);
  constexpr int32_t kFits = (2 << 20) / kTokenBytes;
  const std::vector<Launch> launches =
      LaunchesOf(rig, {Ask(Seq(rig, 1), 0, 1), Ask(Seq(rig, kFits), kFits - 1, 2),
                       Ask(Seq(rig, kFits + 1), kFits, 3)});
  EXPECT_EQ(launches, (std::vector<Launch>{{0, kFits - 1}, {kFits}}));
}

// What an operator wants to know: the short one's wait, in KV tokens that the device reads between
// its call and its answer. Forty long sequences ask again as soon as they are answered.
TEST(KvBytes, AShortSequenceWaitsForTwoLaunchesHoweverManyLongOnesCompete) {
  constexpr int32_t kLong = 300;
  constexpr int32_t kBound = 400;
  Rig rig(Bounded(kBound));
  struct Caller {
    cache::SeqHandle seq;
    int32_t pos = 0;
    std::unique_ptr<DecodeCall> call = nullptr;
    size_t launches_before = 0;
    int64_t steps = 0;
  };
  std::vector<Caller> callers;
  for (int32_t i = 0; i < 40; ++i) callers.push_back({.seq = Seq(rig, kLong), .pos = kLong - 1});
  callers.push_back({.seq = Seq(rig, 1)});
  Caller& brief = callers.back();
  rig.backend.ForgetRecords();
  rig.backend.Hold();
  int64_t longest_wait = 0;
  for (int32_t round = 0; round < 200; ++round) {
    for (Caller& caller : callers) {
      if (caller.call != nullptr && !caller.call->done()) continue;
      if (caller.call != nullptr) ++caller.steps;
      if (&caller == &brief && brief.call != nullptr) {
        const auto launches = rig.backend.RecordsOf(Kind::kDecode);
        int64_t wait = 0;
        for (size_t i = brief.launches_before; i < launches.size(); ++i) {
          for (const int32_t pos : launches[i].positions) wait += pos + 1;
        }
        longest_wait = std::max(longest_wait, wait);
      }
      caller.launches_before = rig.backend.RecordsOf(Kind::kDecode).size();
      caller.call = std::make_unique<DecodeCall>(rig.engine, 0, 0,
                                                 std::vector{Ask(caller.seq, caller.pos, 1)});
      ASSERT_TRUE(caller.call->Submit().ok());
    }
    rig.backend.ReleaseOneFence();
    rig.Settle();
  }
  EXPECT_GT(brief.steps, 50);
  EXPECT_LE(longest_wait, 2 * (kLong + kBound));
  for (const Caller& caller : callers) EXPECT_GE(caller.steps, 3);  // nobody starves
  rig.backend.Release();
  rig.Settle();
}

}  // namespace
}  // namespace fp8kvd::testing
