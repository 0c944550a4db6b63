// Many threads call an engine that runs on its own: counters that hold together, nothing lost.
// Under thread sanitizer this is what finds a race.
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

#include "bench/null_backend.h"
#include "tests/engine/rig.h"

namespace fp8kvd::testing {
namespace {

class WaitingDone final : public engine::Completion {
 public:
  void Done() override {
    is_done_.store(true, std::memory_order_release);
    is_done_.notify_one();
  }
  bool is_done() const { return is_done_.load(std::memory_order_acquire); }
  void Wait() { is_done_.wait(false, std::memory_order_acquire); }

 private:
  std::atomic<bool> is_done_{false};
};

// Who takes turns: only the engine's thread, or every caller that finds it idle.
class Threads : public ::testing::TestWithParam<bool> {
 protected:
  static RigOptions Options() {
    RigOptions options;
    options.returns_at_once = GetParam();
    return options;
  }
};
INSTANTIATE_TEST_SUITE_P(Turns, Threads, ::testing::Bool(), [](const auto& engine_turns) {
  return engine_turns.param ? "OfCallers" : "OfTheEngine";
});

TEST_P(Threads, ConcurrentCallsAreAllAnsweredAndCounted) {
  constexpr int32_t kThreads = 4;
  constexpr int32_t kSteps = 200;
  RigOptions options = Options();
  options.models = {ModelSpec{.windows = {0}}};
  Rig rig(options);
  rig.backend.SetRecording(false);
  const std::vector<cache::SeqHandle> seqs = rig.Create(kThreads);
  std::thread runner([&rig] { EXPECT_TRUE(rig.engine->Run().ok()); });
  std::atomic<bool> is_over{false};
  std::thread reader([&rig, &is_over] {
    while (!is_over) {
      const engine::EngineStats stats = rig.engine->stats();
      for (size_t kind = 0; kind < stats.requests_taken_total.size(); ++kind) {
        EXPECT_GE(stats.requests_taken_total[kind], stats.requests_answered_total[kind]);
      }
      EXPECT_EQ(stats.rows_total, stats.models[0].decode_rows_total);
      EXPECT_EQ(stats.rows_total, stats.batch_rows.sum);
      EXPECT_EQ(stats.rows_total, stats.queue_us.count);
      EXPECT_EQ(stats.pools[0].pages_used + stats.pools[0].pages_free, stats.pools[0].pages_total);
      std::this_thread::yield();
    }
  });
  std::vector<std::thread> callers;
  for (int32_t t = 0; t < kThreads; ++t) {
    callers.emplace_back([&rig, &seqs, t] {
      std::vector<uint64_t> history;
      for (int32_t i = 0; i < kSteps; ++i) {
        const uint64_t token = static_cast<uint64_t>(t) * 10'000 + i + 1;
        DecodeCall call(rig.engine, 0, 0, {Step(seqs[t], i, token)});
        WaitingDone done;
        call.request.done = &done;
        call.request.looks_on = t % 2 == 0;
        ASSERT_TRUE(call.Submit().ok());
        while (call.request.looks_on && !done.is_done()) rig.engine->LookOn();
        done.Wait();
        ASSERT_TRUE(call.items[0].status.ok()) << call.items[0].status;
        history.push_back(token);
        ASSERT_EQ(call.Check(0, history), "");
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  is_over = true;
  reader.join();
  rig.engine->Drain();
  runner.join();
  const engine::EngineStats stats = rig.engine->stats();
  EXPECT_EQ(stats.requests_answered_total[0], uint64_t{kThreads} * kSteps);
  EXPECT_EQ(stats.append_tokens_total, uint64_t{kThreads} * kSteps);
  EXPECT_EQ(stats.queue_items, 0);
}

// A device at work until it is told otherwise, that knows who launches and who looks.
class WatchedBackend final : public bench::NullBackend {
 public:
  absl::Status Decode(const kernels::DecodeParams& /*params*/) override {
    launchers.push_back(std::this_thread::get_id());
    return absl::OkStatus();
  }
  absl::StatusOr<bool> Passed(kernels::FenceId /*fence*/) override {
    if (std::this_thread::get_id() != caller_) ++looks_of_others;
    return is_free.load();
  }

  std::vector<std::thread::id> launchers;  // its turn's
  std::atomic<int32_t> looks_of_others{0};
  std::atomic<bool> is_free{false};

 private:
  const std::thread::id caller_ = std::this_thread::get_id();
};

// An engine whose callers take turns, on a device that is watched.
class Callers : public ::testing::Test {
 protected:
  void SetUp() override {
    const RigOptions options;
    auto engine = engine::Engine::Start(options.engine, options.cache, {MakeModel(ModelSpec{})},
                                        /*incarnation=*/7, &backend_, &clock_);
    ASSERT_TRUE(engine.ok());
    engine_ = *std::move(engine);
  }

  WatchedBackend backend_;
  engine::SteadyClock clock_;
  std::unique_ptr<engine::Engine> engine_;
};

TEST_F(Callers, LeaveTheLaunchesToAThreadThatLooksOn) {
  ControlCall create(engine_.get(), engine::ControlRequest::Op::kCreate);
  create.request.model = 0;
  create.request.count = 2;
  ASSERT_TRUE(create.Submit().ok() && create.done());
  std::vector<std::unique_ptr<DecodeCall>> calls;
  std::vector<WaitingDone> done(2);
  for (size_t i = 0; i < 2; ++i) {
    calls.push_back(std::make_unique<DecodeCall>(
        engine_.get(), 0, 0, std::vector{Step(create.request.handles[i], 0, 1)}));
    calls[i]->request.done = &done[i];
  }
  ASSERT_TRUE(calls[0]->Submit().ok());
  std::thread runner([this] { EXPECT_TRUE(engine_->Run().ok()); });
  // A turn looks twice at most: the third look is of one that follows one that ended with work in
  // flight, and the thread has said since that it looks on.
  while (backend_.looks_of_others < 3) std::this_thread::yield();
  ASSERT_TRUE(calls[1]->Submit().ok());
  backend_.is_free = true;
  for (WaitingDone& one : done) one.Wait();
  engine_->Drain();
  const std::thread::id runner_id = runner.get_id();
  runner.join();
  EXPECT_EQ(backend_.launchers,
            (std::vector<std::thread::id>{std::this_thread::get_id(), runner_id}));
}

// Somebody looks for the end of a launch that its sender looks at no more.
TEST_F(Callers, HandALaunchOverThatTheyLookedAt) {
  ControlCall create(engine_.get(), engine::ControlRequest::Op::kCreate);
  create.request.model = 0;
  ASSERT_TRUE(create.Submit().ok() && create.done());
  DecodeCall call(engine_.get(), 0, 0, std::vector{Step(create.request.handles[0], 0, 1)});
  WaitingDone done;
  call.request.done = &done;
  call.request.looks_on = true;
  ASSERT_TRUE(call.Submit().ok());
  std::thread runner([this] { EXPECT_TRUE(engine_->Run().ok()); });
  engine_->LookAway();
  while (backend_.looks_of_others < 2) std::this_thread::yield();
  backend_.is_free = true;
  done.Wait();
  engine_->Drain();
  runner.join();
}

// Every Submit that was taken is answered, also the one that slips in beside the drain.
TEST_P(Threads, ADrainBesideSubmitsLosesNone) {
  for (int32_t round = 0; round < 50; ++round) {
    Rig rig(Options());
    rig.backend.SetRecording(false);
    const cache::SeqHandle seq = rig.Create();
    std::thread runner([&rig] { EXPECT_TRUE(rig.engine->Run().ok()); });
    std::thread caller([&rig, &seq] {
      for (int32_t i = 0; i < 1000; ++i) {
        DecodeCall call(rig.engine, 0, 0, {Step(seq, i, i + 1)});
        WaitingDone done;
        call.request.done = &done;
        if (!call.Submit().ok()) return;
        done.Wait();
      }
    });
    rig.engine->Drain();
    caller.join();
    runner.join();
  }
}

TEST_P(Threads, AnIdleEngineSleepsAndWakesForACall) {
  Rig rig(Options());
  std::thread runner([&rig] { EXPECT_TRUE(rig.engine->Run().ok()); });
  for (int32_t i = 0; i < 20; ++i) {
    rig.clock.AdvanceUs(1000);  // it has been idle for long: it sleeps at its next look
    ControlCall create(rig.engine, engine::ControlRequest::Op::kCreate);
    WaitingDone done;
    create.request.model = 0;
    create.request.done = &done;
    ASSERT_TRUE(create.Submit().ok());
    done.Wait();
    EXPECT_EQ(create.request.handles.size(), 1u);
  }
  rig.engine->Drain();
  runner.join();
}

// A caller's turn begins an upload of many slices and leaves; the engine's thread does the rest.
TEST_P(Threads, WhatACallersTurnLeavesIsFinished) {
  constexpr int32_t kTokens = 160;  // ten slices
  Rig rig(Options());
  const std::vector<cache::SeqHandle> seqs = rig.Create(20);
  std::thread runner([&rig] { EXPECT_TRUE(rig.engine->Run().ok()); });
  for (const cache::SeqHandle& seq : seqs) {
    AppendCall upload(rig.engine, 0, 0, 1, seq, 0, std::vector<uint64_t>(kTokens, 5));
    WaitingDone done;
    upload.request.done = &done;
    ASSERT_TRUE(upload.Submit().ok());
    done.Wait();
    EXPECT_EQ(upload.seq_lens[0], kTokens);
  }
  rig.engine->Drain();
  runner.join();
}

}  // namespace
}  // namespace fp8kvd::testing
