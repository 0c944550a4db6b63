// Calls whose sequences are on several devices: placed, split and joined.
#include "server/engine/spread.h"

#include <memory>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "server/engine/control_spread.h"
#include "tests/engine/fleet_rig.h"

namespace fp8kvd::testing {
namespace {

using Op = engine::ControlRequest::Op;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

std::vector<uint32_t> HomesOf(const std::vector<cache::SeqHandle>& handles) {
  std::vector<uint32_t> homes;
  for (const cache::SeqHandle& handle : handles) homes.push_back(handle.home);
  return homes;
}

ItemSpec Step(const cache::SeqHandle& handle, int64_t pos, uint64_t token) {
  return {.handle = handle, .pos = pos, .tokens = {token}, .queries = {token + 1000}};
}

TEST(Create, SpreadsItsSequencesInTurn) {
  FleetRig rig(2);
  const auto handles = rig.Create(5);
  EXPECT_THAT(HomesOf(handles), ElementsAre(0, 1, 0, 1, 0));
  const engine::EngineStats stats = rig.fleet->stats();
  EXPECT_EQ(stats.seqs, 5);
  EXPECT_EQ(stats.models[0].seqs, 5);
  EXPECT_EQ(rig.fleet->Of(1).stats().seqs, 2);
}

TEST(Create, GoesWhereMostPagesAre) {
  FleetRig rig(2);
  const auto first = rig.Create(2, /*expected_tokens=*/0);
  rig.Fill(first[0], 0, 640);  // ten pages on device 0
  EXPECT_THAT(HomesOf(rig.Create(2, /*expected_tokens=*/64)), ElementsAre(1, 1));
}

// A reservation that another call took meanwhile: what the scrape of counters could not show.
TEST(Create, AsksTheOtherDevicesWhereOneHasNoRoom) {
  FleetRig rig(2);
  // All of device 0 behind the fleet's back, while its counters are still old.
  SpreadControlCall create(rig.fleet.get(), Op::kCreate);
  create.request.model = 0;
  create.request.expected_tokens = 10 * kPageTokens;
  ControlCall taker(&rig.fleet->Of(0), Op::kCreate);
  taker.request.model = 0;
  taker.request.expected_tokens = FleetRig::kPages * kPageTokens;
  ASSERT_TRUE(taker.Submit().ok());
  ASSERT_TRUE(create.Submit().ok());  // placed on device 0, which is empty as far as one knows
  rig.SettleUntil([&] { return create.done(); });
  ASSERT_TRUE(create.request.status.ok()) << create.request.status;
  EXPECT_THAT(HomesOf(create.request.handles), ElementsAre(1));
}

TEST(Create, MakesAllOrNone) {
  FleetRig rig(2);
  SpreadControlCall create(rig.fleet.get(), Op::kCreate);
  create.request.model = 0;
  create.request.count = 5;  // two fit on each device
  create.request.expected_tokens = FleetRig::kPages / 2 * kPageTokens;
  ASSERT_TRUE(create.Submit().ok());
  rig.SettleUntil([&] { return create.done(); });
  EXPECT_TRUE(absl::IsResourceExhausted(create.request.status)) << create.request.status;
  EXPECT_GT(create.request.retry_after_ms, 0);
  EXPECT_THAT(create.request.handles, SizeIs(0));
  EXPECT_EQ(rig.fleet->stats().seqs, 0);
  EXPECT_THAT(rig.Create(4, FleetRig::kPages / 2 * kPageTokens), SizeIs(4));
}

TEST(Create, HoldsTheBoundOfAllDevicesTogether) {
  FleetRig rig(2, /*seqs_max=*/6);
  ASSERT_THAT(rig.Create(6), SizeIs(6));
  SpreadControlCall more(rig.fleet.get(), Op::kCreate);
  more.request.model = 0;
  const absl::Status status = more.Submit();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("1 sequences asked, 0 of 6 are left"));
  EXPECT_GT(more.request.retry_after_ms, 0);
}

TEST(Fork, StaysOnItsParentsDevice) {
  FleetRig rig(2);
  const auto parents = rig.Create(2);
  const auto tokens = rig.Fill(parents[1], 0, 70);
  SpreadControlCall fork(rig.fleet.get(), Op::kFork);
  fork.request.handles = {parents[1]};
  fork.request.count = 3;
  ASSERT_TRUE(fork.Submit().ok());
  rig.SettleUntil([&] { return fork.done(); });
  ASSERT_TRUE(fork.request.status.ok()) << fork.request.status;
  EXPECT_THAT(HomesOf(fork.request.handles), Each(1));
  EXPECT_EQ(rig.fleet->stats().forks_total, 3U);
}

TEST(Fork, IsRefusedWhereItsParentsDeviceHasNoRoomThoughAnotherHas) {
  FleetRig rig(2);
  const auto parents = rig.Create(2);
  SpreadControlCall fork(rig.fleet.get(), Op::kFork);
  fork.request.handles = {parents[1]};
  fork.request.count = 2;
  fork.request.expected_tokens = (FleetRig::kPages - 1) * kPageTokens;
  ASSERT_TRUE(fork.Submit().ok());
  rig.SettleUntil([&] { return fork.done(); });
  EXPECT_TRUE(absl::IsResourceExhausted(fork.request.status)) << fork.request.status;
  EXPECT_THAT(std::string(fork.request.status.message()), HasSubstr("pages to reserve"));
}

TEST(Control, AnswersHandlesOfAllDevicesInTheirOrder) {
  FleetRig rig(3);
  const auto handles = rig.Create(6);
  rig.Fill(handles[4], 0, 9);
  SpreadControlCall stat(rig.fleet.get(), Op::kStat);
  stat.request.handles = handles;
  stat.request.handles[2].generation += 7;  // stale
  stat.request.handles[3].home = 9;         // of no device
  ASSERT_TRUE(stat.Submit().ok());
  rig.SettleUntil([&] { return stat.done(); });
  ASSERT_TRUE(stat.request.status.ok());
  ASSERT_THAT(stat.request.item_status, SizeIs(6));
  for (const size_t i : {0, 1, 4, 5}) {
    EXPECT_TRUE(stat.request.item_status[i].ok()) << i;
    EXPECT_EQ(stat.request.infos[i].handle, handles[i]);
  }
  EXPECT_EQ(stat.request.infos[4].seq_lens[0], 9);
  EXPECT_TRUE(absl::IsNotFound(stat.request.item_status[2]));
  EXPECT_TRUE(absl::IsNotFound(stat.request.item_status[3]));
}

TEST(Control, AListGoesFromDeviceToDevice) {
  FleetRig rig(3);
  const auto handles = rig.Create(8);
  std::set<std::pair<uint32_t, uint64_t>> seen;
  uint64_t after = 0;
  int pages = 0;
  do {
    SpreadControlCall list(rig.fleet.get(), Op::kList);
    list.request.count = 3;
    list.request.list_after = after;
    ASSERT_TRUE(list.Submit().ok());
    rig.SettleUntil([&] { return list.done(); });
    ASSERT_TRUE(list.request.status.ok()) << list.request.status;
    for (const engine::SequenceInfo& info : list.request.infos) {
      seen.emplace(info.handle.home, static_cast<uint64_t>(info.handle.seq_id));
    }
    after = list.request.list_next;
    ASSERT_LT(++pages, 10);
  } while (after != 0);
  EXPECT_THAT(seen, SizeIs(8));
  EXPECT_LE(pages, 4);
  SpreadControlCall wrong(rig.fleet.get(), Op::kList);
  wrong.request.list_after = uint64_t{3} << 48;
  ASSERT_TRUE(wrong.Submit().ok());
  rig.SettleUntil([&] { return wrong.done(); });
  EXPECT_TRUE(absl::IsInvalidArgument(wrong.request.status)) << wrong.request.status;
}

TEST(Decode, OfTwoDevicesAnswersEveryItemInItsPlace) {
  FleetRig rig(2);
  const auto handles = rig.Create(5);
  SpreadDecodeCall first(rig.fleet.get(), 0, 0,
                         {Step(handles[0], 0, 1), Step(handles[1], 0, 2), Step(handles[2], 0, 3),
                          Step(handles[3], 7, 4), Step(handles[4], 0, 5)});
  ASSERT_TRUE(first.Submit().ok());
  rig.SettleUntil([&] { return first.done(); });
  ASSERT_TRUE(first.status().ok());
  for (const int32_t item : {0, 1, 2, 4}) {
    EXPECT_EQ(first.Check(item, {static_cast<uint64_t>(item + 1)}), "");
  }
  EXPECT_TRUE(absl::IsOutOfRange(first.ItemStatus(3))) << first.ItemStatus(3);
  EXPECT_EQ(first.times_done(), 1);
  // The message is one request of its model, whatever devices it met.
  EXPECT_EQ(rig.fleet->stats().models[0].decode_requests_total, 1U);
}

TEST(Decode, WaitsForTheSlowerDevice) {
  FleetRig rig(2);
  const auto handles = rig.Create(2);
  rig.backends[1].Hold();
  SpreadDecodeCall call(rig.fleet.get(), 0, 0, {Step(handles[0], 0, 1), Step(handles[1], 0, 2)});
  ASSERT_TRUE(call.Submit().ok());
  rig.Settle();
  EXPECT_FALSE(call.done());
  rig.backends[1].Release();
  rig.SettleUntil([&] { return call.done(); });
  EXPECT_EQ(call.Check(1, {2}), "");
}

TEST(Decode, ItsItemsFailAloneWhereOneQueueIsFull) {
  FleetRig rig(2, /*seqs_max=*/400);
  const auto handles = rig.Create(300);
  std::vector<ItemSpec> filling;
  for (size_t i = 1; i < handles.size(); i += 2) filling.push_back(Step(handles[i], 0, i));
  rig.backends[1].Hold();
  SpreadDecodeCall full(rig.fleet.get(), 0, 0, filling);
  ASSERT_TRUE(full.Submit().ok());  // 150 of device 1's 160 places
  std::vector<ItemSpec> both;
  for (size_t i = 0; i < 24; ++i) both.push_back(Step(handles[i], 0, 5000 + i));
  SpreadDecodeCall call(rig.fleet.get(), 0, 1, both);
  ASSERT_TRUE(call.Submit().ok());
  rig.SettleUntil([&] { return call.done(); });
  ASSERT_TRUE(call.status().ok());
  for (int32_t i = 0; i < 24; ++i) {
    if (i % 2 == 0) {
      EXPECT_EQ(call.Check(i, {5000 + static_cast<uint64_t>(i)}), "");
    } else {
      EXPECT_TRUE(absl::IsResourceExhausted(call.ItemStatus(i))) << call.ItemStatus(i);
      EXPECT_GT(call.ItemRetryMs(i), 0);
    }
  }
  rig.backends[1].Release();
  rig.SettleUntil([&] { return full.done(); });
}

TEST(Decode, OfADeviceThatFailedFailsAsAWhole) {
  FleetRig rig(2);
  const auto handles = rig.Create(2);
  rig.backends[1].FailCall(0);
  SpreadDecodeCall call(rig.fleet.get(), 0, 0, {Step(handles[0], 0, 1), Step(handles[1], 0, 2)});
  ASSERT_TRUE(call.Submit().ok());
  rig.SettleUntil([&] { return call.done(); });
  EXPECT_TRUE(absl::IsUnavailable(call.status())) << call.status();
  EXPECT_TRUE(rig.fleet->stats().failed);
  // The other device goes on until the daemon drains it.
  SpreadDecodeCall other(rig.fleet.get(), 0, 1, {Step(handles[0], 0, 3)});
  ASSERT_TRUE(other.Submit().ok());
  rig.SettleUntil([&] { return other.done(); });
  EXPECT_EQ(other.Check(0, {3}), "");
}

TEST(Decode, CancelledBeforeItsWorkBeginsIsCancelledOnEveryDevice) {
  FleetRig rig(2);
  const auto handles = rig.Create(2);
  SpreadDecodeCall call(rig.fleet.get(), 0, 0, {Step(handles[0], 0, 1), Step(handles[1], 0, 2)});
  ASSERT_TRUE(call.Submit().ok());
  call.Cancel();
  rig.SettleUntil([&] { return call.done(); });
  EXPECT_TRUE(absl::IsCancelled(call.status())) << call.status();
  EXPECT_EQ(rig.fleet->stats().requests_cancelled_total, 2U);
}

// A retry finds what was committed on either device.
TEST(Decode, SentAgainIsAReplayOnEveryDevice) {
  FleetRig rig(2);
  const auto handles = rig.Create(2);
  for (int32_t time = 0; time < 2; ++time) {
    SpreadDecodeCall call(rig.fleet.get(), 0, 0, {Step(handles[0], 0, 1), Step(handles[1], 0, 2)});
    ASSERT_TRUE(call.Submit().ok());
    rig.SettleUntil([&] { return call.done(); });
    EXPECT_EQ(call.Check(0, {1}), "");
    EXPECT_EQ(call.Check(1, {2}), "");
  }
  EXPECT_EQ(rig.fleet->stats().replays_total, 2U);
  EXPECT_EQ(rig.fleet->stats().append_tokens_total, 2U);
}

TEST(Tenants, HaveTheirBoundsOnAllDevicesTogether) {
  std::vector<config::TenantOptions> tenants = {
      {.name = "a", .pages_share_max = 0.5, .seqs_max = 3, .inflight_items_max = 4},
      {.name = "b", .pages_share_max = 0.5, .seqs_max = 30, .inflight_items_max = 100}};
  FleetRig rig(2, /*seqs_max=*/32, tenants);
  const auto handles = rig.Create(3);
  SpreadControlCall fourth(rig.fleet.get(), Op::kCreate);
  fourth.request.model = 0;
  EXPECT_TRUE(absl::IsResourceExhausted(fourth.Submit()));
  fourth.request.tenant = cache::TenantId{1};
  EXPECT_TRUE(fourth.Submit().ok());
  rig.SettleUntil([&] { return fourth.done(); });
  // Three are in flight on both devices together, of four that may be; two more are too many.
  rig.backends[0].Hold();
  rig.backends[1].Hold();
  SpreadDecodeCall three(rig.fleet.get(), 0, 0,
                         {Step(handles[0], 0, 1), Step(handles[1], 0, 2), Step(handles[2], 0, 3)});
  ASSERT_TRUE(three.Submit().ok());
  SpreadDecodeCall more(rig.fleet.get(), 0, 1, {Step(handles[0], 0, 1), Step(handles[2], 0, 2)});
  const absl::Status status = more.Submit();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  rig.Settle();
  EXPECT_EQ(rig.fleet->stats().tenants[0].queue_items, 3);
  rig.backends[0].Release();
  rig.backends[1].Release();
  rig.SettleUntil([&] { return three.done(); });
}

}  // namespace
}  // namespace fp8kvd::testing
