// A snapshot restores what was saved, bit for bit. Files that are refused:
// snapshot_refusal_test.cc.
#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/cpu/backend.h"
#include "server/engine/worker_pool.h"
#include "tests/engine/snapshot_rig.h"

namespace fp8kvd::testing {
namespace {

using ::testing::HasSubstr;
using Op = engine::ControlRequest::Op;

TEST(Snapshot, ARestoredSequenceGoesOnWhereItStood) {
  std::string snapshot;
  cache::SeqHandle seq;
  std::vector<uint64_t> history;
  engine::SnapshotInfo info;
  {
    SnapshotRig before;
    seq = before.Create();
    history = before.Fill(seq, 0, 100);
    snapshot = before.DrainAndSave(&info);
  }
  EXPECT_EQ(info.seqs, 1);
  EXPECT_EQ(info.pages, 2);
  SnapshotRig after;
  StringSource source(snapshot);
  engine::SnapshotInfo read;
  const absl::Status status = engine::RestoreSnapshot(&after.fleet, &source, &read);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(read.version, "0.1.0");
  EXPECT_EQ(read.unix_ms, 1234);
  EXPECT_EQ(read.bytes, info.bytes);
  EXPECT_EQ(after.engine->incarnation(), seq.incarnation);
  EXPECT_EQ(after.PagesUsed(), 2);
  after.Fill(seq, 0, 100);  // as a client that never heard the answer: a replay
  EXPECT_EQ(after.engine->stats().append_tokens_total, 0u);
  history.push_back(7);
  for (int32_t layer = 0; layer < 2; ++layer) {
    DecodeCall step(after.engine, 0, layer, {Step(seq, 100, 7)});
    after.Run(step);
    ASSERT_TRUE(step.items[0].status.ok()) << step.items[0].status;
    EXPECT_EQ(step.Check(0, history), "");
  }
}

// Known fault: a restore that reports success and restores nothing.
TEST(Snapshot, LeasesStartAtTheRestoreAndEndLikeAnyOther) {
  std::string snapshot;
  {
    SnapshotRig before;
    before.Fill(before.Create(), 0, 10);
    before.clock.AdvanceUs(900'000);  // of a lease of a second
    snapshot = before.DrainAndSave();
  }
  SnapshotRig after;
  after.clock.AdvanceUs(int64_t{3600} * 1'000'000);
  ASSERT_TRUE(after.Restore(snapshot).ok());
  EXPECT_EQ(after.engine->stats().seqs, 1);
  after.clock.AdvanceUs(999'000);
  after.Settle();
  EXPECT_EQ(after.engine->stats().seqs, 1);
  after.clock.AdvanceUs(1'000);
  after.Settle();
  EXPECT_EQ(after.engine->stats().seqs, 0);
  EXPECT_EQ(after.PagesUsed(), 0);
}

TEST(Snapshot, PagesThatForksShareAreInItOnceAndStayShared) {
  std::string snapshot;
  engine::SnapshotInfo info;
  std::vector<cache::SeqHandle> children;
  std::vector<uint64_t> history;
  {
    SnapshotRig before;
    const cache::SeqHandle parent = before.Create();
    history = before.Fill(parent, 0, 640);
    ControlCall fork(before.engine, Op::kFork);
    fork.request.handles = {parent};
    fork.request.count = 8;
    before.Run(fork);
    children = fork.request.handles;
    snapshot = before.DrainAndSave(&info);
  }
  ASSERT_EQ(children.size(), 8U);
  EXPECT_EQ(info.seqs, 9);
  EXPECT_EQ(info.pages, 10);
  SnapshotRig after;
  ASSERT_TRUE(after.Restore(snapshot).ok());
  EXPECT_EQ(after.PagesUsed(), 10);
  history.push_back(3);
  for (const cache::SeqHandle& child : children) {
    DecodeCall step(after.engine, 0, 0, {Step(child, 640, 3)});
    after.Run(step);
    EXPECT_EQ(step.Check(0, history), "");
  }
  EXPECT_EQ(after.PagesUsed(), 18);
}

TEST(Snapshot, IsNotMadeBeforeTheDrainNorAfterADeviceFault) {
  SnapshotRig rig;
  const cache::SeqHandle seq = rig.Create();
  StringSink sink;
  engine::SnapshotInfo info;
  EXPECT_THAT(std::string(engine::SaveSnapshot(&rig.fleet, &sink, &info).message()),
              HasSubstr("not drained"));
  rig.backend.FailCall(0);
  DecodeCall call(rig.engine, 0, 0, {Step(seq, 0, 1)});
  rig.Run(call);
  EXPECT_FALSE(rig.engine->Run().ok());
  EXPECT_THAT(std::string(engine::SaveSnapshot(&rig.fleet, &sink, &info).message()),
              HasSubstr("device"));
  EXPECT_TRUE(sink.text.empty());
}

TEST(Snapshot, EndsWithTheErrorOfWhoeverTakesItsBytes) {
  SnapshotRig rig;
  rig.Fill(rig.Create(), 0, 640);
  rig.engine->Drain();
  ASSERT_TRUE(rig.engine->Run().ok());
  StringSink whole;
  engine::SnapshotInfo info;
  ASSERT_TRUE(engine::SaveSnapshot(&rig.fleet, &whole, &info).ok());
  for (size_t room = 0; room < whole.text.size(); room += 99) {
    StringSink full(room);
    EXPECT_TRUE(absl::IsResourceExhausted(engine::SaveSnapshot(&rig.fleet, &full, &info))) << room;
  }
  StringSink again;  // none of them did any harm
  ASSERT_TRUE(engine::SaveSnapshot(&rig.fleet, &again, &info).ok());
  EXPECT_EQ(again.text, whole.text);
}

// Random clients: what they appended, forked, cut and freed.
class RandomClients {
 public:
  RandomClients(uint32_t seed, SnapshotRig* rig) : random_(seed), rig_(rig) {}

  void Step() {
    const uint32_t choice = Below(10);
    if (seqs_.empty() || (choice == 0 && seqs_.size() < 20)) {
      const auto model = static_cast<int32_t>(Below(2));
      seqs_.push_back({rig_->Create(1, Below(2) * 200, model)[0], model, {}});
      return;
    }
    Seq& seq = seqs_[Below(static_cast<uint32_t>(seqs_.size()))];
    const auto len = static_cast<int64_t>(seq.tokens.size());
    if (choice < 6 && len < 900) {
      const auto n = static_cast<int32_t>(1 + Below(90));
      const auto more = rig_->Fill(seq.handle, len, n, next_token_ += 1000, seq.model);
      seq.tokens.insert(seq.tokens.end(), more.begin(), more.end());
    } else if (choice < 8 && seqs_.size() < 20) {
      ControlCall fork(rig_->engine, Op::kFork);
      fork.request.handles = {seq.handle};
      fork.request.count = 1;
      rig_->Run(fork);
      ASSERT_TRUE(fork.request.status.ok()) << fork.request.status;
      Seq child = seq;
      child.handle = fork.request.handles[0];
      seqs_.push_back(std::move(child));
    } else if (choice == 8) {
      const auto pos = std::max<int64_t>(0, len - Below(12));  // within the slack
      if (rig_->Control(Op::kTruncate, seq.handle, pos).ok()) seq.tokens.resize(pos);
    } else if (choice == 9 && seqs_.size() > 3) {
      EXPECT_TRUE(rig_->Control(Op::kFree, seq.handle).ok());
      freed_.push_back(seq.handle);
      std::swap(seq, seqs_.back());
      seqs_.pop_back();
    }
  }

  // They go on with another engine, which should know all that the one before knew.
  void MoveTo(SnapshotRig* rig) {
    rig_ = rig;
    EXPECT_EQ(rig_->engine->stats().seqs, static_cast<int64_t>(seqs_.size()));
    for (const cache::SeqHandle& handle : freed_) {
      EXPECT_TRUE(absl::IsNotFound(rig_->Control(Op::kRenew, handle)));
    }
    Check();
  }

  // Every sequence's last query of every layer sees exactly its tokens.
  void Check() {
    for (const Seq& seq : seqs_) {
      const auto len = static_cast<int64_t>(seq.tokens.size());
      for (int32_t layer = 0; len > 0 && layer < 3; ++layer) {
        DecodeCall ask(rig_->engine, seq.model, layer, {Ask(seq.handle, len - 1, 42)});
        rig_->Run(ask);
        ASSERT_TRUE(ask.items[0].status.ok()) << ask.items[0].status;
        ASSERT_EQ(ask.Check(0, seq.tokens), "");
      }
    }
  }

 private:
  struct Seq {
    cache::SeqHandle handle;
    int32_t model = 0;
    std::vector<uint64_t> tokens;
  };
  uint32_t Below(uint32_t bound) { return static_cast<uint32_t>(random_() % bound); }

  std::mt19937 random_;
  SnapshotRig* rig_;
  std::vector<Seq> seqs_;
  std::vector<cache::SeqHandle> freed_;
  uint64_t next_token_ = 1000;
};

TEST(Snapshot, RandomHistoriesGoOnInAFreshEngineThreeTimes) {
  RigOptions options;
  options.models = {ModelSpec{.windows = {0, 40, 40}, .pages = 400},
                    ModelSpec{.name = "n", .windows = {64, 0, 0}, .kv_heads = 2, .pages = 400}};
  for (uint32_t seed = 1; seed <= 8; seed += kOneIn) {
    auto rig = std::make_unique<SnapshotRig>(options);
    RandomClients clients(seed, rig.get());
    for (int32_t round = 0; round < 3; ++round) {
      for (int32_t i = 0; i < 60; ++i) clients.Step();
      clients.Check();
      const int64_t pages_used = rig->PagesUsed();
      const std::string snapshot = rig->DrainAndSave();
      rig = std::make_unique<SnapshotRig>(options);
      const absl::Status status = rig->Restore(snapshot);
      ASSERT_TRUE(status.ok()) << status << ", seed " << seed;
      EXPECT_EQ(rig->PagesUsed(), pages_used);
      clients.MoveTo(rig.get());
      ASSERT_FALSE(HasFatalFailure()) << "seed " << seed;
    }
  }
}

TEST(Snapshot, TenantsKeepTheirOwnAndTheirBounds) {
  RigOptions options;
  for (const char* name : {"a", "b"}) {
    options.tenants.push_back(
        {.name = name, .pages_share_max = 0.5, .seqs_max = 1, .inflight_items_max = 9});
  }
  const auto create = [](SnapshotRig* rig, uint32_t tenant_id) {
    ControlCall call(rig->engine, Op::kCreate);
    call.request.model = 0;
    call.request.count = 1;
    call.request.tenant = cache::TenantId{tenant_id};
    rig->Run(call);
    return call.request.status;
  };
  std::string snapshot;
  {
    SnapshotRig before(options);
    EXPECT_TRUE(create(&before, 1).ok());
    snapshot = before.DrainAndSave();
  }
  std::swap(options.tenants[0], options.tenants[1]);
  SnapshotRig after(options);
  ASSERT_TRUE(after.Restore(snapshot).ok());
  EXPECT_EQ(after.engine->stats().tenants[0].seqs, 1) << "b stands first now";
  EXPECT_EQ(after.engine->stats().tenants[1].seqs, 0);
  EXPECT_TRUE(absl::IsResourceExhausted(create(&after, 0)));
  EXPECT_TRUE(create(&after, 1).ok());
}

// Handles name their device and go on there, in messages that are split over both; new sequences
// have the same incarnation everywhere, also on a device that had nothing.
TEST(Snapshot, OfSeveralDevicesRestoresEachToItsOwn) {
  std::string snapshot;
  engine::SnapshotInfo info;
  std::vector<cache::SeqHandle> seqs;
  std::vector<std::vector<uint64_t>> histories;
  {
    SnapshotFleetRig before(3);
    seqs = before.Create(7);
    for (size_t i = 0; i < seqs.size(); ++i) {
      const auto tokens = static_cast<int32_t>(50 + 20 * i);
      histories.push_back(before.Fill(seqs[i], 0, tokens, 1000 * (i + 1)));
    }
    for (size_t i = seqs.size(); i-- > 0;) {  // the last device has none left
      if (seqs[i].home != 2) continue;
      ControlCall free(&before.fleet->Of(2), Op::kFree);
      free.request.handles = {seqs[i]};
      ASSERT_TRUE(free.Submit().ok());
      before.Settle();
      seqs.erase(seqs.begin() + static_cast<ptrdiff_t>(i));
      histories.erase(histories.begin() + static_cast<ptrdiff_t>(i));
    }
    snapshot = before.DrainAndSave(&info);
  }
  ASSERT_EQ(info.seqs, static_cast<int64_t>(seqs.size()));
  SnapshotFleetRig after(3, {ModelSpec{}}, 32, /*incarnation=*/8);
  const absl::Status status = after.Restore(snapshot);
  ASSERT_TRUE(status.ok()) << status;
  std::vector<ItemSpec> items;
  for (size_t i = 0; i < seqs.size(); ++i) {
    items.push_back(Step(seqs[i], static_cast<int64_t>(histories[i].size()), 7));
    histories[i].push_back(7);
  }
  SpreadDecodeCall step(after.fleet.get(), 0, 1, items);
  ASSERT_EQ(step.parts(), 2U);
  ASSERT_TRUE(step.Submit().ok());
  after.SettleUntil([&] { return step.done(); });
  ASSERT_TRUE(step.status().ok());
  for (size_t i = 0; i < seqs.size(); ++i) {
    const auto item = static_cast<int32_t>(i);
    ASSERT_TRUE(step.ItemStatus(item).ok()) << step.ItemStatus(item);
    EXPECT_EQ(step.Check(item, histories[i]), "");
  }
  for (const cache::SeqHandle& handle : after.Create(3)) {
    EXPECT_EQ(handle.incarnation, 7U);
    EXPECT_EQ(std::count(seqs.begin(), seqs.end(), handle), 0);
  }
}

// The bytes that the CPU's kernels left, in both precisions, on two devices.
class CpuSnapshot : public ::testing::TestWithParam<Precision> {
 protected:
  struct Machine {
    explicit Machine(Precision precision) {
      const ModelSpec spec{
          .windows = {0, 64}, .kv_heads = 2, .head_dim = 64, .precision = precision};
      for (uint32_t home = 0; home < 2; ++home) {
        engines[home] = *engine::Engine::Start(
            {.devices = {}, .staging_bytes = int64_t{4} << 20, .staging_slots = 16},
            {.seqs_max = 8, .seq_len_max = 1024}, {MakeModel(spec)}, /*incarnation=*/7,
            &backends[home], &clock, {}, {.home = home});
      }
      fleet = std::make_unique<engine::Fleet>(
          std::vector<engine::Engine*>{engines[0].get(), engines[1].get()});
      EXPECT_TRUE(engine::PrepareSnapshots(fleet.get()).ok());
    }
    template <typename Call>
    void Run(engine::Engine* engine, Call& call) {
      ASSERT_TRUE(call.Submit().ok());
      while (engine->Step()) {
      }
      ASSERT_TRUE(call.done());
    }
    // A sequence of 200 tokens on each device.
    std::vector<cache::SeqHandle> Fill() {
      std::vector<cache::SeqHandle> seqs;
      for (uint64_t home = 0; home < 2; ++home) {
        engine::Engine* const engine = engines[home].get();
        ControlCall create(engine, Op::kCreate);
        create.request.model = 0;
        create.request.count = 1;
        Run(engine, create);
        seqs.push_back(create.request.handles[0]);
        std::vector<uint64_t> tokens(200);
        std::iota(tokens.begin(), tokens.end(), 1 + 1000 * home);
        AppendCall fill(engine, 0, 0, 2, seqs.back(), 0, tokens);
        Run(engine, fill);
      }
      return seqs;
    }
    // What queries over all tokens are answered, byte by byte.
    std::set<std::string> Answers(const std::vector<cache::SeqHandle>& seqs) {
      std::set<std::string> answers;
      for (const cache::SeqHandle& seq : seqs) {
        for (int32_t layer = 0; layer < 2; ++layer) {
          DecodeCall ask(engines[seq.home].get(), 0, layer, {Ask(seq, 199, 42)});
          Run(engines[seq.home].get(), ask);
          EXPECT_TRUE(ask.items[0].status.ok()) << ask.items[0].status;
          answers.emplace(static_cast<const char*>(ask.request.out), 4 * 64 * sizeof(uint16_t));
        }
      }
      return answers;
    }
    engine::WorkerPool workers{1};
    kernels::cpu::CpuBackend backends[2] = {kernels::cpu::CpuBackend(&workers),
                                            kernels::cpu::CpuBackend(&workers)};
    ManualClock clock;
    std::unique_ptr<engine::Engine> engines[2];
    std::unique_ptr<engine::Fleet> fleet;
  };
};

TEST_P(CpuSnapshot, AnswersBitForBitAsBefore) {
  Machine before(GetParam());
  const std::vector<cache::SeqHandle> seqs = before.Fill();
  const std::set<std::string> answers = before.Answers(seqs);
  ASSERT_EQ(answers.size(), 4U) << "each is another";
  const std::string snapshot = DrainAndSaveAll(before.fleet.get());
  Machine after(GetParam());
  const absl::Status status = RestoreAll(after.fleet.get(), snapshot);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(after.Answers(seqs), answers);
}

INSTANTIATE_TEST_SUITE_P(In, CpuSnapshot, ::testing::Values(Precision::kBf16, Precision::kFp8Kv),
                         [](const auto& precision) {
                           return std::string(precision.param == Precision::kBf16 ? "bf16"
                                                                                  : "fp8_kv");
                         });

}  // namespace
}  // namespace fp8kvd::testing
