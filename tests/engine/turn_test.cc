// Turns of callers: where the device returns at once, who finds the engine idle works for it.
#include <vector>

#include "gtest/gtest.h"

#include "server/engine/watch.h"
#include "tests/engine/rig.h"

namespace fp8kvd::testing {
namespace {

RigOptions CallersTakeTurns() {
  RigOptions options;
  options.returns_at_once = true;
  return options;
}

TEST(Turn, ACallThatFindsTheEngineIdleIsAnsweredWithinSubmit) {
  Rig rig(CallersTakeTurns());
  const cache::SeqHandle seq = rig.Create();
  DecodeCall call(rig.engine, 0, 0, {Step(seq, 0, 1)});
  ASSERT_TRUE(call.Submit().ok());
  EXPECT_TRUE(call.done());
  EXPECT_EQ(call.Check(0, {1}), "");
}

TEST(Turn, ADeviceThatWorksInsideTheCallIsLeftToTheEnginesThread) {
  Rig rig;
  const cache::SeqHandle seq = rig.Create();
  DecodeCall call(rig.engine, 0, 0, {Step(seq, 0, 1)});
  ASSERT_TRUE(call.Submit().ok());
  EXPECT_FALSE(call.done());
  rig.Settle();
  EXPECT_TRUE(call.done());
}

TEST(Turn, ACallersTurnNeverWaitsForTheDevice) {
  Rig rig(CallersTakeTurns());
  const cache::SeqHandle seq = rig.Create();
  rig.backend.Hold();
  DecodeCall call(rig.engine, 0, 0, {Step(seq, 0, 1)});
  ASSERT_TRUE(call.Submit().ok());
  EXPECT_FALSE(call.done());
  rig.backend.Release();
  rig.engine->Step();
  EXPECT_TRUE(call.done());
}

TEST(Turn, ASenderThatLooksOnSeesTheEndOfItsLaunch) {
  Rig rig(CallersTakeTurns());
  const cache::SeqHandle seq = rig.Create();
  rig.backend.Hold();
  DecodeCall call(rig.engine, 0, 0, {Step(seq, 0, 1)});
  call.request.looks_on = true;
  ASSERT_TRUE(call.Submit().ok());
  rig.engine->LookOn();
  EXPECT_FALSE(call.done());
  rig.backend.Release();
  rig.engine->LookOn();
  EXPECT_TRUE(call.done());
  EXPECT_EQ(call.Check(0, {1}), "");
}

TEST(Turn, LookingOnLeavesADeviceThatWorksInsideTheCallToTheEnginesThread) {
  Rig rig;
  const cache::SeqHandle seq = rig.Create();
  DecodeCall call(rig.engine, 0, 0, {Step(seq, 0, 1)});
  call.request.looks_on = true;
  ASSERT_TRUE(call.Submit().ok());
  rig.engine->LookOn();
  EXPECT_FALSE(call.done());
  rig.Settle();
  EXPECT_TRUE(call.done());
}

TEST(Watch, LooksOnWhereADecodeIsUnderWay) {
  Rig rig(CallersTakeTurns());
  const cache::SeqHandle seq = rig.Create();
  const engine::Fleet fleet({rig.engine});
  engine::Watch watch(&fleet);
  EXPECT_TRUE(watch.may_look_on());
  engine::DecodePart part;
  engine::DecodePart* const parts[] = {&part};
  rig.backend.Hold();
  DecodeCall call(rig.engine, 0, 0, {Step(seq, 0, 1)});
  watch.Begin(parts);
  ASSERT_TRUE(call.Submit().ok());
  rig.backend.Release();
  watch.End(parts);
  watch.LookOn();
  EXPECT_FALSE(call.done());
  watch.Begin(parts);
  watch.LookOn();
  EXPECT_TRUE(call.done());
}

TEST(Watch, HasNothingToLookForWhereTheDeviceWorksInsideTheCall) {
  Rig rig;
  const engine::Fleet fleet({rig.engine});
  engine::Watch watch(&fleet);
  engine::DecodePart part;
  engine::DecodePart* const parts[] = {&part};
  watch.Begin(parts);
  EXPECT_FALSE(watch.may_look_on());
  EXPECT_TRUE(watch.empty());
}

TEST(Turn, AnUploadIsLeftToTheEnginesThread) {
  Rig rig(CallersTakeTurns());
  const cache::SeqHandle seq = rig.Create();
  AppendCall upload(rig.engine, 0, 0, 1, seq, 0, std::vector<uint64_t>(48, 5));
  ASSERT_TRUE(upload.Submit().ok());
  EXPECT_EQ(rig.engine->stats().append_slices_total, 0u);
  EXPECT_FALSE(upload.done());
  rig.Settle();
  EXPECT_TRUE(upload.done());
}

std::vector<int32_t> RowsLaunched(const Rig& rig) {
  std::vector<int32_t> rows;
  for (const auto& record : rig.backend.RecordsOf(FakeBackend::Record::Kind::kDecode)) {
    rows.push_back(record.count);
  }
  return rows;
}

TEST(Turn, BehindALaunchThatRunsGoesOneAsLarge) {
  Rig rig(CallersTakeTurns());
  const std::vector<cache::SeqHandle> seqs = rig.Create(7);
  rig.backend.Hold();
  DecodeCall running(rig.engine, 0, 0, {Step(seqs[0], 0, 1), Step(seqs[1], 0, 1)});
  ASSERT_TRUE(running.Submit().ok());
  DecodeCall first(rig.engine, 0, 0, {Step(seqs[2], 0, 1)});
  ASSERT_TRUE(first.Submit().ok());
  EXPECT_EQ(RowsLaunched(rig), (std::vector<int32_t>{2}));
  DecodeCall second(rig.engine, 0, 0, {Step(seqs[3], 0, 1)});
  ASSERT_TRUE(second.Submit().ok());
  EXPECT_EQ(RowsLaunched(rig), (std::vector<int32_t>{2, 2}));
  rig.backend.Release();
  rig.Settle();
  EXPECT_TRUE(running.done() && first.done() && second.done());
}

TEST(Turn, ASmallerLaunchGoesWhenTheDeviceIsFree) {
  Rig rig(CallersTakeTurns());
  const std::vector<cache::SeqHandle> seqs = rig.Create(3);
  rig.backend.Hold();
  DecodeCall running(rig.engine, 0, 0, {Step(seqs[0], 0, 1), Step(seqs[1], 0, 1)});
  ASSERT_TRUE(running.Submit().ok());
  DecodeCall small(rig.engine, 0, 0, {Step(seqs[2], 0, 1)});
  ASSERT_TRUE(small.Submit().ok());
  rig.backend.ReleaseOneFence();
  rig.Settle();
  EXPECT_TRUE(running.done());
  EXPECT_EQ(RowsLaunched(rig), (std::vector<int32_t>{2, 1}));
  rig.backend.Release();
  rig.Settle();
  EXPECT_TRUE(small.done());
}

TEST(Turn, WhatWaitsForCompanyEndsByItsDeadlineWhenAnUploadLooks) {
  Rig rig(CallersTakeTurns());
  const std::vector<cache::SeqHandle> seqs = rig.Create(4);
  rig.backend.Hold();
  DecodeCall running(rig.engine, 0, 0, {Step(seqs[0], 0, 1), Step(seqs[1], 0, 1)});
  ASSERT_TRUE(running.Submit().ok());
  DecodeCall late(rig.engine, 0, 0, {Step(seqs[2], 0, 1)});
  late.request.deadline = rig.clock.NowUs() + 10;
  ASSERT_TRUE(late.Submit().ok());
  rig.clock.AdvanceUs(20);
  AppendCall upload(rig.engine, 0, 0, 1, seqs[3], 0, std::vector<uint64_t>(16, 5));
  ASSERT_TRUE(upload.Submit().ok());
  rig.engine->Step();
  EXPECT_TRUE(late.done() && absl::IsDeadlineExceeded(late.request.status));
  EXPECT_EQ(rig.engine->stats().append_slices_total, 1u);  // nothing waits in front of it
  rig.backend.Release();
  rig.Settle();
  EXPECT_TRUE(running.done() && upload.done());
}

TEST(Turn, ACallerThatDiesWithTheDeviceIsAnswered) {
  Rig rig(CallersTakeTurns());
  const cache::SeqHandle seq = rig.Create();
  rig.backend.FailCall(1);
  DecodeCall call(rig.engine, 0, 0, {Step(seq, 0, 1)});
  ASSERT_TRUE(call.Submit().ok());
  EXPECT_TRUE(call.done());
  EXPECT_TRUE(absl::IsUnavailable(call.request.status));
}

}  // namespace
}  // namespace fp8kvd::testing
