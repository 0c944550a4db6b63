// How decodes are batched, ordered and answered.
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"

#include "tests/engine/rig.h"

namespace fp8kvd::testing {
namespace {

using Kind = FakeBackend::Record::Kind;

std::vector<int32_t> RowsOfLaunches(const Rig& rig) {
  std::vector<int32_t> rows;
  for (const FakeBackend::Record& record : rig.backend.RecordsOf(Kind::kDecode)) {
    rows.push_back(record.count);
  }
  return rows;
}

TEST(Decode, AppendsTheTokenAndSeesItWithAllBefore) {
  Rig rig;
  const cache::SeqHandle seq = rig.Create();
  std::vector<uint64_t> history = rig.Fill(seq, 0, 100);
  history.push_back(42);
  DecodeCall call(rig.engine, 0, /*layer=*/1, {Step(seq, 100, 42)});
  rig.Run(call);
  ASSERT_TRUE(call.items[0].status.ok()) << call.items[0].status;
  EXPECT_EQ(call.Check(0, history), "");
}

TEST(Decode, WhatWaitsWhileTheDeviceWorksSharesTheNextLaunch) {
  RigOptions options;
  options.engine.launches_inflight_max = 1;
  options.models = {ModelSpec{.name = "a"}, ModelSpec{.name = "b", .windows = {0, 0, 0}}};
  Rig rig(options);
  const std::vector<cache::SeqHandle> of_a = rig.Create(3);
  const std::vector<cache::SeqHandle> of_b = rig.Create(2, 0, /*model=*/1);
  rig.backend.ForgetRecords();
  rig.backend.Hold();
  DecodeCall first(rig.engine, 0, 0, {Step(of_a[0], 0, 1)});
  rig.Run(first);
  DecodeCall other_seq(rig.engine, 0, 0, {Step(of_a[1], 0, 2), Step(of_a[2], 0, 3)});
  DecodeCall other_layer(rig.engine, 0, 1, {Step(of_a[0], 0, 4)});
  DecodeCall other_model(rig.engine, 1, 2, {Step(of_b[0], 0, 5), Step(of_b[1], 0, 6)});
  rig.Run(other_seq);
  rig.Run(other_layer);
  rig.Run(other_model);
  rig.backend.Release();
  rig.Settle();
  EXPECT_EQ(RowsOfLaunches(rig), (std::vector<int32_t>{1, 5}));
  EXPECT_EQ(other_model.request.batch_items, 5);
}

TEST(Decode, AnIdleDeviceIsNotKeptWaiting) {
  Rig rig;
  const cache::SeqHandle seq = rig.Create();
  DecodeCall call(rig.engine, 0, 0, {Step(seq, 0, 1)});
  ASSERT_TRUE(call.Submit().ok());
  rig.engine->Step();
  EXPECT_TRUE(call.done());
}

TEST(Decode, ShapesDoNotMixAndTheOldestGoesFirst) {
  RigOptions options;
  options.engine.launches_inflight_max = 1;
  Rig rig(options);
  const std::vector<cache::SeqHandle> seqs = rig.Create(4);
  rig.backend.ForgetRecords();
  rig.backend.Hold();
  DecodeCall running(rig.engine, 0, 0, {Step(seqs[0], 0, 1)});
  rig.Run(running);
  DecodeCall fp32(rig.engine, 0, 0, {Step(seqs[1], 0, 2)}, kernels::OutType::kFp32);
  DecodeCall bf16(rig.engine, 0, 0, {Step(seqs[2], 0, 3)});
  DecodeCall fp32_too(rig.engine, 0, 0, {Step(seqs[3], 0, 4)}, kernels::OutType::kFp32);
  for (DecodeCall* call : {&fp32, &bf16, &fp32_too}) rig.Run(*call);
  rig.backend.Release();
  rig.Settle();
  const std::vector<FakeBackend::Record> launches = rig.backend.RecordsOf(Kind::kDecode);
  ASSERT_EQ(launches.size(), 3u);
  EXPECT_EQ(launches[1].out_type, kernels::OutType::kFp32);
  EXPECT_EQ(launches[1].count, 2);
  EXPECT_EQ(launches[2].out_type, kernels::OutType::kBf16);
}

TEST(Decode, TwoStepsOfOneLayerMayShareALaunchAndSeeOnlyTheirOwnPast) {
  RigOptions options;
  options.engine.launches_inflight_max = 1;
  Rig rig(options);
  const std::vector<cache::SeqHandle> seqs = rig.Create(2);
  rig.backend.ForgetRecords();
  rig.backend.Hold();
  DecodeCall running(rig.engine, 0, 0, {Step(seqs[1], 0, 9)});
  rig.Run(running);
  DecodeCall step0(rig.engine, 0, 0, {Step(seqs[0], 0, 1)});
  DecodeCall step1(rig.engine, 0, 0, {Step(seqs[0], 1, 2)});
  rig.Run(step0);
  rig.Run(step1);
  rig.backend.Release();
  rig.Settle();
  EXPECT_EQ(RowsOfLaunches(rig), (std::vector<int32_t>{1, 2}));
  const std::vector<uint64_t> history = {1, 2};
  EXPECT_EQ(step0.Check(0, history), "");
  EXPECT_EQ(step1.Check(0, history), "");
}

TEST(Decode, ALaterStepOfAnotherShapeWaitsForTheEarlierOne) {
  RigOptions options;
  options.engine.launches_inflight_max = 1;
  Rig rig(options);
  const std::vector<cache::SeqHandle> seqs = rig.Create(3);
  rig.backend.Hold();
  DecodeCall running(rig.engine, 0, 0, {Step(seqs[1], 0, 9)});
  rig.Run(running);
  DecodeCall oldest(rig.engine, 0, 0, {Step(seqs[2], 0, 8)});
  DecodeCall step0(rig.engine, 0, 0, {Step(seqs[0], 0, 1)}, kernels::OutType::kFp32);
  DecodeCall step1(rig.engine, 0, 0, {Step(seqs[0], 1, 2)});  // the shape of the oldest
  for (DecodeCall* call : {&oldest, &step0, &step1}) rig.Run(*call);
  rig.backend.Release();
  rig.Settle();
  ASSERT_TRUE(step1.items[0].status.ok()) << step1.items[0].status;
  EXPECT_EQ(step1.Check(0, std::vector<uint64_t>{1, 2}), "");
}

TEST(Decode, AFailedItemHarmsNoOther) {
  Rig rig;
  const std::vector<cache::SeqHandle> seqs = rig.Create(3);
  ASSERT_TRUE(rig.Control(engine::ControlRequest::Op::kFree, seqs[0]).ok());
  DecodeCall call(rig.engine, 0, 0,
                  {Step(seqs[0], 0, 1), Step(seqs[1], 5, 2), Step(seqs[2], 0, 3)});
  rig.Run(call);
  EXPECT_TRUE(call.request.status.ok());
  EXPECT_TRUE(absl::IsNotFound(call.items[0].status)) << call.items[0].status;
  EXPECT_TRUE(absl::IsOutOfRange(call.items[1].status)) << call.items[1].status;
  ASSERT_TRUE(call.items[2].status.ok()) << call.items[2].status;
  EXPECT_EQ(call.Check(2, std::vector<uint64_t>{3}), "");
}

TEST(Decode, AnItemThatItsPollerRefusedIsSkipped) {
  Rig rig;
  const std::vector<cache::SeqHandle> seqs = rig.Create(2);
  DecodeCall call(rig.engine, 0, 0, {Step(seqs[0], 0, 1), Step(seqs[1], 0, 2)});
  call.items[0].status = absl::InvalidArgumentError("q holds a NaN");
  rig.Run(call);
  EXPECT_TRUE(absl::IsInvalidArgument(call.items[0].status));
  EXPECT_EQ(call.Check(1, std::vector<uint64_t>{2}), "");
  DecodeCall again(rig.engine, 0, 0, {Step(seqs[0], 0, 1)});  // nothing was committed
  rig.Run(again);
  EXPECT_TRUE(again.items[0].status.ok()) << again.items[0].status;
}

TEST(Decode, ASequenceOfAnotherModelIsRefused) {
  RigOptions options;
  options.models = {ModelSpec{.name = "a"}, ModelSpec{.name = "b"}};
  Rig rig(options);
  const cache::SeqHandle of_b = rig.Create(1, 0, /*model=*/1)[0];
  DecodeCall call(rig.engine, 0, 0, {Step(of_b, 0, 1)});
  rig.Run(call);
  EXPECT_TRUE(absl::IsInvalidArgument(call.items[0].status)) << call.items[0].status;
}

TEST(Decode, ARetryBehindItsOriginalIsAReplayWithTheSameAnswer) {
  RigOptions options;
  options.engine.launches_inflight_max = 1;
  Rig rig(options);
  const cache::SeqHandle seq = rig.Create();
  rig.backend.Hold();
  DecodeCall original(rig.engine, 0, 0, {Step(seq, 0, 1)});
  rig.Run(original);
  DecodeCall retry(rig.engine, 0, 0, {Step(seq, 0, 1)});
  rig.Run(retry);
  EXPECT_FALSE(retry.done());
  rig.backend.Release();
  rig.Settle();
  EXPECT_EQ(rig.engine->stats().replays_total, 1u);
  EXPECT_EQ(retry.Check(0, std::vector<uint64_t>{1}), "");
}

TEST(Decode, ARetryWithOtherBytesIsRefusedAndChangesNothing) {
  Rig rig;
  const cache::SeqHandle seq = rig.Create();
  DecodeCall original(rig.engine, 0, 0, {Step(seq, 0, 1)});
  rig.Run(original);
  DecodeCall other(rig.engine, 0, 0, {Step(seq, 0, 2)});
  rig.Run(other);
  EXPECT_TRUE(absl::IsAlreadyExists(other.items[0].status)) << other.items[0].status;
  DecodeCall asks(rig.engine, 0, 0, {Ask(seq, 0, 3)});
  rig.Run(asks);
  EXPECT_EQ(asks.Check(0, std::vector<uint64_t>{1}), "");
}

TEST(Decode, MoreItemsThanALaunchHoldsRunInSeveral) {
  RigOptions options;
  options.engine.batch_rows_max = 3;
  Rig rig(options);
  const std::vector<cache::SeqHandle> seqs = rig.Create(8);
  rig.backend.ForgetRecords();
  std::vector<ItemSpec> items;
  for (size_t i = 0; i < seqs.size(); ++i) items.push_back(Step(seqs[i], 0, i + 1));
  DecodeCall call(rig.engine, 0, 0, items);
  rig.Run(call);
  EXPECT_EQ(RowsOfLaunches(rig), (std::vector<int32_t>{3, 3, 2}));
  for (size_t i = 0; i < seqs.size(); ++i) {
    EXPECT_EQ(call.Check(static_cast<int32_t>(i), std::vector<uint64_t>{i + 1}), "");
  }
}

TEST(Decode, BatchWaitGathersUntilTheOldestHasWaitedSoLong) {
  RigOptions options;
  options.engine.batch_wait_us_max = 100;
  Rig rig(options);
  const std::vector<cache::SeqHandle> seqs = rig.Create(2);
  rig.backend.ForgetRecords();
  DecodeCall first(rig.engine, 0, 0, {Step(seqs[0], 0, 1)});
  first.request.arrived = rig.clock.NowUs();
  rig.Run(first);
  rig.clock.AdvanceUs(99);
  rig.Settle();
  EXPECT_FALSE(first.done());
  DecodeCall second(rig.engine, 0, 0, {Step(seqs[1], 0, 2)});
  second.request.arrived = rig.clock.NowUs();
  rig.Run(second);
  rig.clock.AdvanceUs(1);
  rig.Settle();
  EXPECT_EQ(RowsOfLaunches(rig), (std::vector<int32_t>{2}));
}

TEST(Decode, SeveralQueriesSeeWhatStandsBeforeEachOfThem) {
  RigOptions options;
  options.models = {ModelSpec{.windows = {0, 5}}};
  Rig rig(options);
  const cache::SeqHandle seq = rig.Create();
  std::vector<uint64_t> history = rig.Fill(seq, 0, 6);
  const std::vector<uint64_t> tokens = {21, 22, 23};
  history.insert(history.end(), tokens.begin(), tokens.end());
  for (const int32_t layer : {0, 1}) {
    DecodeCall call(rig.engine, 0, layer,
                    {ItemSpec{.handle = seq, .pos = 6, .tokens = tokens, .queries = {1, 2, 3}}});
    rig.Run(call);
    ASSERT_TRUE(call.items[0].status.ok()) << call.items[0].status;
    EXPECT_EQ(call.Check(0, history), "") << "layer " << layer;
  }
}

// The window's page comes free while the batch is planned; another item of the batch must not get
// it.
TEST(Decode, APageThatAWindowGivesBackIsNotOverwrittenInTheSameLaunch) {
  RigOptions options;
  options.models = {ModelSpec{.windows = {64}, .pages = 5}};
  options.cache.reclaim_slack_tokens = 0;
  options.engine.launches_inflight_max = 1;
  Rig rig(options);
  const std::vector<cache::SeqHandle> seqs = rig.Create(3);
  std::vector<uint64_t> history;
  for (int32_t pos = 0; pos < 127; pos += 16) {
    const std::vector<uint64_t> part = rig.Fill(seqs[0], pos, std::min(16, 127 - pos), 1000 + pos);
    history.insert(history.end(), part.begin(), part.end());
  }
  rig.Fill(seqs[2], 0, 64, 5000);
  rig.Fill(seqs[2], 64, 1, 6000);
  ASSERT_EQ(rig.PagesUsed(), 4);
  rig.backend.ForgetRecords();
  rig.backend.Hold();
  DecodeCall running(rig.engine, 0, 0, {Ask(seqs[2], 64, 1)});
  rig.Run(running);
  history.push_back(71);
  DecodeCall reads_old(rig.engine, 0, 0, {Ask(seqs[0], 126, 8)});       // sees 63 .. 126
  DecodeCall last_of_page(rig.engine, 0, 0, {Step(seqs[0], 127, 71)});  // 0 .. 63 come free
  const std::vector<uint64_t> page_full(64, 73);
  DecodeCall takes(
      rig.engine, 0, 0,
      {ItemSpec{.handle = seqs[1], .pos = 0, .tokens = page_full, .queries = page_full}});
  AppendCall follows(rig.engine, 0, 0, 1, seqs[1], 64, {74});  // must not overtake what is put off
  for (DecodeCall* call : {&reads_old, &last_of_page, &takes}) rig.Run(*call);
  rig.Run(follows);
  rig.backend.Release();
  rig.Settle();
  for (DecodeCall* call : {&reads_old, &last_of_page, &takes}) {
    ASSERT_TRUE(call->items[0].status.ok()) << call->items[0].status;
  }
  EXPECT_TRUE(follows.request.status.ok()) << follows.request.status;
  EXPECT_EQ(reads_old.Check(0, history), "");
  EXPECT_EQ(last_of_page.Check(0, history), "");
  EXPECT_EQ(takes.Check(0, page_full), "");
}

}  // namespace
}  // namespace fp8kvd::testing
