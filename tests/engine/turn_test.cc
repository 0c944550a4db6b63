// Turns of callers: where the device returns at once, who finds the engine idle works for it.
#include "gtest/gtest.h"

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

TEST(Turn, ACallersTurnTakesOneSliceOfAnUpload) {
  Rig rig(CallersTakeTurns());
  const cache::SeqHandle seq = rig.Create();
  AppendCall upload(rig.engine, 0, 0, 1, seq, 0, std::vector<uint64_t>(48, 5));
  ASSERT_TRUE(upload.Submit().ok());
  EXPECT_EQ(rig.engine->stats().append_slices_total, 1u);
  EXPECT_FALSE(upload.done());
  rig.Settle();
  EXPECT_TRUE(upload.done());
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
