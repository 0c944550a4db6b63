// How calls end: full queue, deadline, cancel, drain, device fault, lease.
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"

#include "tests/engine/rig.h"

namespace fp8kvd::testing {
namespace {

using Op = engine::ControlRequest::Op;

TEST(Queue, FullIsAnsweredAtOnceWithADelay) {
  RigOptions options;
  options.engine.queue_items_max = 3;
  Rig rig(options);
  const std::vector<cache::SeqHandle> seqs = rig.Create(2);
  DecodeCall two(rig.engine, 0, 0, {Step(seqs[0], 0, 1), Step(seqs[1], 0, 2)});
  DecodeCall two_more(rig.engine, 0, 0, {Step(seqs[0], 1, 3), Step(seqs[1], 1, 4)});
  ASSERT_TRUE(two.Submit().ok());
  const absl::Status refused = two_more.Submit();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_GT(two_more.request.retry_after_ms, 0);
  EXPECT_EQ(two_more.times_done(), 0);
  rig.Settle();
  EXPECT_TRUE(two_more.Submit().ok());  // places came back with the answer
  rig.Settle();
  EXPECT_EQ(rig.engine->stats().requests_refused_total, 1u);
}

TEST(Queue, TheDelayGrowsWithWhatWaitsAndWhatItCosts) {
  RigOptions options;
  options.engine.queue_items_max = 2;
  options.engine.launches_inflight_max = 1;
  Rig rig(options);
  const std::vector<cache::SeqHandle> seqs = rig.Create(2);
  rig.backend.Hold();
  DecodeCall slow(rig.engine, 0, 0, {Step(seqs[0], 0, 1)});
  rig.Run(slow);
  rig.clock.AdvanceUs(800'000);
  rig.backend.Release();
  rig.Settle();  // an item took 800 ms; the average moves by an eighth
  DecodeCall waits(rig.engine, 0, 0, {Step(seqs[0], 1, 2), Step(seqs[1], 0, 3)});
  DecodeCall refused(rig.engine, 0, 0, {Step(seqs[1], 1, 4)});
  ASSERT_TRUE(waits.Submit().ok());
  ASSERT_FALSE(refused.Submit().ok());
  EXPECT_EQ(refused.request.retry_after_ms, 200);
  rig.Settle();
}

TEST(Deadline, PassedInTheQueueEndsTheCallWithoutWork) {
  Rig rig;
  const cache::SeqHandle seq = rig.Create();
  DecodeCall late(rig.engine, 0, 0, {Step(seq, 0, 1)});
  late.request.deadline = rig.clock.NowUs() + 10;
  ASSERT_TRUE(late.Submit().ok());
  rig.clock.AdvanceUs(10);
  rig.Settle();
  EXPECT_TRUE(absl::IsDeadlineExceeded(late.request.status)) << late.request.status;
  DecodeCall again(rig.engine, 0, 0, {Step(seq, 0, 2)});  // other bytes: nothing was committed
  rig.Run(again);
  EXPECT_TRUE(again.items[0].status.ok()) << again.items[0].status;
}

TEST(Deadline, AFullPoolAnswersInsteadOfHanging) {
  RigOptions options;
  options.models = {ModelSpec{.windows = {0}, .pages = 1}};
  Rig rig(options);
  const std::vector<cache::SeqHandle> seqs = rig.Create(2);
  rig.Fill(seqs[0], 0, 64);
  DecodeCall append(rig.engine, 0, 0, {Step(seqs[1], 0, 1)});
  rig.Run(append);
  EXPECT_TRUE(append.done());
  EXPECT_TRUE(absl::IsResourceExhausted(append.items[0].status)) << append.items[0].status;
  EXPECT_GT(append.items[0].retry_after_ms, 0);
}

TEST(Cancel, BeforeWorkBeginsFinishesTheCallWithoutWork) {
  Rig rig;
  const cache::SeqHandle seq = rig.Create();
  rig.backend.ForgetRecords();
  DecodeCall call(rig.engine, 0, 0, {Step(seq, 0, 1)});
  call.request.cancelled = true;
  rig.Run(call);
  EXPECT_EQ(call.times_done(), 1);
  EXPECT_TRUE(absl::IsCancelled(call.request.status)) << call.request.status;
  EXPECT_TRUE(rig.backend.records().empty());
}

TEST(Cancel, AfterTheLaunchStillFinishesTheCallOnce) {
  Rig rig;
  const cache::SeqHandle seq = rig.Create();
  rig.backend.Hold();
  DecodeCall call(rig.engine, 0, 0, {Step(seq, 0, 1)});
  rig.Run(call);
  call.request.cancelled = true;
  rig.Settle();
  EXPECT_EQ(call.times_done(), 0);  // the device still writes its slot
  rig.backend.Release();
  rig.Settle();
  EXPECT_EQ(call.times_done(), 1);
}

// A decode and a slice go in one turn. What the decode's end sets free between them is the slice's
// to write: its poison must not come after.
TEST(Free, APageThatComesBackBetweenTwoLaunchesIsNotPoisonedUnderItsNewOwner) {
  RigOptions options;
  options.models = {ModelSpec{.windows = {0}, .pages = 2}};
  Rig rig(options);
  const cache::SeqHandle leaving = rig.Create();
  const cache::SeqHandle staying = rig.Create();
  const cache::SeqHandle coming = rig.Create();
  rig.Fill(leaving, 0, 1);
  rig.Fill(staying, 0, 1);  // the pool is full
  rig.backend.PassNoFenceBefore(/*decodes=*/2);
  DecodeCall running(rig.engine, 0, 0, {Ask(leaving, 0, 1)});
  rig.Run(running);
  ASSERT_TRUE(rig.Control(engine::ControlRequest::Op::kFree, leaving).ok());
  ASSERT_FALSE(running.done());
  DecodeCall next(rig.engine, 0, 0, {Ask(staying, 0, 2)});
  AppendCall append(rig.engine, 0, 0, 1, coming, 0, {3000});
  ASSERT_TRUE(next.Submit().ok() && append.Submit().ok());
  rig.Settle();
  EXPECT_TRUE(append.request.status.ok()) << append.request.status;
  DecodeCall check(rig.engine, 0, 0, {Ask(coming, 0, 3)});
  rig.Run(check);
  EXPECT_EQ(check.Check(0, {3000}), "");
}

TEST(Drain, FinishesWhatWasTakenAndRefusesTheRest) {
  RigOptions options;
  options.engine.launches_inflight_max = 1;
  Rig rig(options);
  const cache::SeqHandle seq = rig.Create();
  rig.backend.Hold();
  DecodeCall running(rig.engine, 0, 0, {Step(seq, 0, 1)});
  DecodeCall waiting(rig.engine, 0, 0, {Step(seq, 1, 2)});
  DecodeCall late(rig.engine, 0, 0, {Step(seq, 2, 3)});
  rig.Run(running);
  rig.Run(waiting);
  rig.engine->Drain();
  EXPECT_TRUE(absl::IsUnavailable(late.Submit()));
  rig.backend.Release();
  EXPECT_TRUE(rig.engine->Run().ok());
  EXPECT_TRUE(running.done() && running.items[0].status.ok());
  EXPECT_TRUE(waiting.done() && waiting.items[0].status.ok());
  EXPECT_TRUE(rig.engine->stats().draining);
}

TEST(DeviceFault, FailsEveryCallInFlightAndEndsRun) {
  RigOptions options;
  options.engine.launches_inflight_max = 1;
  Rig rig(options);
  const std::vector<cache::SeqHandle> seqs = rig.Create(3);
  rig.backend.Hold();
  DecodeCall running(rig.engine, 0, 0, {Step(seqs[0], 0, 1)});
  rig.Run(running);
  DecodeCall waiting(rig.engine, 0, 0, {Step(seqs[1], 0, 2)});
  AppendCall upload(rig.engine, 0, 0, 2, seqs[2], 0, {5, 6, 7});
  ControlCall free(rig.engine, Op::kFree);
  free.request.handles = {seqs[1]};
  for (const absl::Status& status : {waiting.Submit(), upload.Submit(), free.Submit()}) {
    ASSERT_TRUE(status.ok());
  }
  rig.backend.FailCall(0);
  const absl::Status end = rig.engine->Run();
  EXPECT_EQ(end.code(), absl::StatusCode::kInternal) << end;
  EXPECT_TRUE(absl::IsUnavailable(running.request.status)) << running.request.status;
  EXPECT_TRUE(absl::IsUnavailable(waiting.request.status));
  EXPECT_TRUE(absl::IsUnavailable(upload.request.status));
  EXPECT_TRUE(absl::IsUnavailable(free.request.status));
  EXPECT_EQ(running.times_done() + waiting.times_done() + upload.times_done(), 3);
  DecodeCall after(rig.engine, 0, 0, {Step(seqs[0], 0, 1)});
  EXPECT_TRUE(absl::IsUnavailable(after.Submit()));
  EXPECT_TRUE(rig.engine->stats().failed);
  EXPECT_EQ(rig.engine->stats().queue_items, 0);
}

// Fences have not passed yet at so many looks at them.
class LateBackend final : public FakeBackend {
 public:
  absl::StatusOr<bool> Passed(kernels::FenceId fence) override {
    if (looks_in_vain > 0 && looks_in_vain-- > 0) return false;
    return FakeBackend::Passed(fence);
  }
  int32_t looks_in_vain = 0;
};

// The poison of a page that came free earlier is the only work of the turn that meets the fault.
TEST(DeviceFault, SeenWhilePoisoningFailsEveryCallToo) {
  RigOptions options;
  options.engine.launches_inflight_max = 1;
  ManualClock clock;
  LateBackend backend;
  auto started = engine::Engine::Start(options.engine, options.cache, {MakeModel(ModelSpec{})},
                                       /*incarnation=*/7, &backend, &clock);
  ASSERT_TRUE(started.ok());
  engine::Engine* const engine = started->get();
  const auto settle = [engine] {
    for (int32_t turns = 0; engine->Step(); ++turns) ASSERT_LT(turns, 1000);
  };
  ControlCall create(engine, Op::kCreate);
  create.request.model = 0;
  create.request.count = 3;
  create.request.ttl_ms = 1000;
  ASSERT_TRUE(create.Submit().ok());
  settle();
  const std::vector<cache::SeqHandle> seqs = create.request.handles;
  AppendCall fill(engine, 0, 0, 1, seqs[2], 0, {1, 2, 3});
  ASSERT_TRUE(fill.Submit().ok());
  settle();
  ASSERT_TRUE(fill.done());
  clock.AdvanceUs(600'000);
  DecodeCall running(engine, 0, 0, {Step(seqs[0], 0, 1)});
  DecodeCall waiting(engine, 0, 0, {Step(seqs[1], 0, 2)}, kernels::OutType::kFp32);
  ASSERT_TRUE(running.Submit().ok());
  ASSERT_TRUE(waiting.Submit().ok());
  backend.looks_in_vain = 3;  // two of the turn that launches, the first of the next
  engine->Step();
  clock.AdvanceUs(500'000);
  engine->Step();  // the third sequence's lease ends, its page waits for poison; the fence passes
  ASSERT_TRUE(running.done());
  ASSERT_FALSE(waiting.done());
  backend.FailCall(0);
  engine->Step();
  EXPECT_TRUE(waiting.done());
  EXPECT_TRUE(absl::IsUnavailable(waiting.request.status)) << waiting.request.status;
}

TEST(Lease, ASequenceThatNobodyNamesIsFreed) {
  Rig rig;
  const cache::SeqHandle seq = rig.Create();
  rig.Fill(seq, 0, 10);
  rig.clock.AdvanceUs(999'000);
  rig.Settle();
  EXPECT_EQ(rig.PagesUsed(), 1);
  rig.clock.AdvanceUs(1'000);
  rig.Settle();
  EXPECT_EQ(rig.PagesUsed(), 0);
  EXPECT_EQ(rig.engine->stats().lease_expiries_total, 1u);
  DecodeCall call(rig.engine, 0, 0, {Step(seq, 10, 1)});
  rig.Run(call);
  EXPECT_TRUE(absl::IsNotFound(call.items[0].status)) << call.items[0].status;
}

TEST(Lease, EveryMessageStartsItAnew) {
  Rig rig;
  const std::vector<cache::SeqHandle> seqs = rig.Create(3);
  for (int32_t i = 0; i < 5; ++i) {
    rig.clock.AdvanceUs(900'000);
    DecodeCall step(rig.engine, 0, 0, {Step(seqs[0], i, i + 1)});
    rig.Run(step);
    EXPECT_TRUE(step.items[0].status.ok()) << step.items[0].status;
    EXPECT_TRUE(rig.Control(Op::kRenew, seqs[1]).ok());
  }
  EXPECT_TRUE(absl::IsNotFound(rig.Control(Op::kStat, seqs[2])));
}

TEST(Lease, NoneEndsWithWorkQueuedOrInFlight) {
  RigOptions options;
  options.engine.launches_inflight_max = 1;
  Rig rig(options);
  const cache::SeqHandle seq = rig.Create();
  rig.backend.Hold();
  DecodeCall running(rig.engine, 0, 0, {Step(seq, 0, 1)});
  DecodeCall waiting(rig.engine, 0, 0, {Step(seq, 1, 2)});
  rig.Run(running);
  rig.Run(waiting);
  rig.clock.AdvanceUs(5'000'000);
  rig.Settle();
  rig.backend.Release();
  rig.Settle();
  EXPECT_TRUE(running.items[0].status.ok()) << running.items[0].status;
  EXPECT_TRUE(waiting.items[0].status.ok()) << waiting.items[0].status;
  EXPECT_EQ(rig.PagesUsed(), 0);  // and then it ends
}

TEST(Control, WaitsForOlderWorkOnItsSequence) {
  RigOptions options;
  options.engine.launches_inflight_max = 1;
  Rig rig(options);
  const std::vector<cache::SeqHandle> seqs = rig.Create(2);
  rig.backend.Hold();
  DecodeCall running(rig.engine, 0, 0, {Step(seqs[1], 0, 1)});
  rig.Run(running);
  DecodeCall step(rig.engine, 0, 0, {Step(seqs[0], 0, 2)});
  ControlCall free(rig.engine, Op::kFree);
  free.request.handles = {seqs[0]};
  DecodeCall after(rig.engine, 0, 0, {Step(seqs[0], 1, 3)});
  rig.Run(step);
  rig.Run(free);
  rig.Run(after);
  rig.backend.Release();
  rig.Settle();
  EXPECT_TRUE(step.items[0].status.ok()) << step.items[0].status;
  EXPECT_TRUE(free.request.item_status[0].ok());
  EXPECT_TRUE(absl::IsNotFound(after.items[0].status)) << after.items[0].status;
}

TEST(Control, AForkSeesItsParentAndGoesItsOwnWay) {
  Rig rig;
  const cache::SeqHandle parent = rig.Create();
  std::vector<uint64_t> history = rig.Fill(parent, 0, 70);
  ControlCall fork(rig.engine, Op::kFork);
  fork.request.handles = {parent};
  rig.Run(fork);
  ASSERT_TRUE(fork.request.status.ok()) << fork.request.status;
  const cache::SeqHandle child = fork.request.handles[0];
  DecodeCall in_child(rig.engine, 0, 0, {Step(child, 70, 1)});
  DecodeCall in_parent(rig.engine, 0, 0, {Step(parent, 70, 2)});
  rig.Run(in_child);
  rig.Run(in_parent);
  std::vector<uint64_t> of_child = history;
  of_child.push_back(1);
  history.push_back(2);
  EXPECT_EQ(in_child.Check(0, of_child), "");
  EXPECT_EQ(in_parent.Check(0, history), "");
  EXPECT_EQ(rig.engine->stats().page_copies_total, 1u);
}

TEST(Control, ListGoesThroughAllModelsInPages) {
  RigOptions options;
  options.models = {ModelSpec{.name = "a"}, ModelSpec{.name = "b"}};
  Rig rig(options);
  rig.Create(3, 0, 0);
  rig.Create(2, 0, 1);
  std::vector<int32_t> models;
  uint64_t after = 0;
  int32_t pages = 0;
  do {
    ControlCall list(rig.engine, Op::kList);
    list.request.count = 2;
    list.request.list_after = after;
    rig.Run(list);
    ASSERT_TRUE(list.request.status.ok()) << list.request.status;
    for (const engine::SequenceInfo& info : list.request.infos) models.push_back(info.model);
    after = list.request.list_next;
    ASSERT_LT(++pages, 10);
  } while (after != 0);
  EXPECT_EQ(models, (std::vector<int32_t>{0, 0, 0, 1, 1}));
}

// Known fault: a list that finds little holds up everybody's steps while it looks.
TEST(Control, AListGoesOverABoundedPartOfTheStoreInATurn) {
  RigOptions options;
  options.cache.seqs_max = 50'000;
  options.models = {ModelSpec{.name = "a"}, ModelSpec{.name = "b"}, ModelSpec{.name = "c"},
                    ModelSpec{.name = "d"}};
  Rig rig(options);
  rig.Create(1, 0, 0);
  rig.Create(1, 0, 3);
  std::vector<size_t> found;
  uint64_t after = 0;
  do {
    ControlCall list(rig.engine, Op::kList);
    list.request.count = 10;
    list.request.list_after = after;
    rig.Run(list);
    ASSERT_TRUE(list.request.status.ok()) << list.request.status;
    found.push_back(list.request.infos.size());
    after = list.request.list_next;
    ASSERT_LT(found.size(), 10U);
  } while (after != 0);
  EXPECT_EQ(found, (std::vector<size_t>{1, 1})) << "two of four models each time";
}

TEST(Control, StatCountsPagesAndBytesOfTheSequence) {
  Rig rig;
  const cache::SeqHandle seq = rig.Create();
  rig.Fill(seq, 0, 65);
  ControlCall stat(rig.engine, Op::kStat);
  stat.request.handles = {seq};
  rig.Run(stat);
  const engine::SequenceInfo& info = stat.request.infos[0];
  EXPECT_EQ(info.seq_lens, (std::vector<int64_t>{65, 65}));
  EXPECT_EQ(info.pages, 2);
  EXPECT_EQ(info.bytes, 2 * 2 * 64 * 2 * 4 * 2);  // pages x layers x tokens x (K, V) x d x 2 B
  EXPECT_EQ(info.ttl_left_ms, 1000);
}

TEST(Control, ALeaseBeyondTheLongestAllowedIsRefused) {
  Rig rig;
  ControlCall create(rig.engine, Op::kCreate);
  create.request.model = 0;
  create.request.ttl_ms = int64_t{1} << 40;
  rig.Run(create);
  EXPECT_TRUE(absl::IsInvalidArgument(create.request.status)) << create.request.status;
}

}  // namespace
}  // namespace fp8kvd::testing
