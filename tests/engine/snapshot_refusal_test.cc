// Files that are no snapshot of this daemon's: each is refused by what is wrong with it, whole, and
// the engine serves as if there had been none.
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include <xxhash.h>

#include "server/engine/snapshot_facts.h"
#include "tests/engine/snapshot_rig.h"

namespace fp8kvd::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

// Two models with two sequences, one of them forked.
RigOptions Options() {
  RigOptions options;
  options.models = {ModelSpec{.windows = {0, 32}, .pages = 16}, ModelSpec{.name = "n", .pages = 8}};
  return options;
}

std::string Saved() {
  SnapshotRig rig(Options());
  const cache::SeqHandle parent = rig.Create(1, 0, 0)[0];
  rig.Fill(parent, 0, 70, 1000, 0);
  ControlCall fork(rig.engine, engine::ControlRequest::Op::kFork);
  fork.request.handles = {parent};
  fork.request.count = 1;
  rig.Run(fork);
  rig.Fill(rig.Create(1, 0, 1)[0], 0, 70, 5000, 1);
  return rig.DrainAndSave();
}

// The same on two devices: a sequence of each model on both, forks on the first.
class TwoDevices : public SnapshotFleetRig {
 public:
  explicit TwoDevices(int32_t devices = 2, int32_t seqs_max = 32)
      : SnapshotFleetRig(devices, Options().models, seqs_max) {}

  std::string Saved(uint64_t first_id = 1000) {
    for (int32_t model = 0; model < 2; ++model) {
      for (const cache::SeqHandle& handle : Create(2, 0, model)) {
        homes_ |= 1U << handle.home;
        Fill(handle, 0, 70 - model * 60, first_id, model);
        if (handle.home == 0) Fork(handle);
      }
    }
    EXPECT_EQ(homes_, 3U) << "both devices have something";
    return DrainAndSave();
  }
  void Fork(const cache::SeqHandle& parent) {
    SpreadControlCall fork(fleet.get(), engine::ControlRequest::Op::kFork);
    fork.request.handles = {parent};
    fork.request.count = 1;
    ASSERT_TRUE(fork.Submit().ok());
    SettleUntil([&] { return fork.done(); });
  }
  // The engines have nothing of what was refused.
  void ExpectNothingRestored() const {
    const engine::EngineStats stats = fleet->stats();
    EXPECT_EQ(stats.seqs, 0);
    for (const engine::PoolStats& pool : stats.pools) EXPECT_EQ(pool.pages_used, 0);
    for (int32_t i = 0; i < fleet->devices(); ++i) EXPECT_EQ(fleet->Of(i).incarnation(), 7U);
  }

 private:
  uint32_t homes_ = 0;
};

void ExpectNothingRestored(SnapshotRig* rig) {
  EXPECT_EQ(rig->engine->stats().seqs, 0);
  EXPECT_EQ(rig->PagesUsed(), 0);
  EXPECT_EQ(rig->engine->incarnation(), 7U);
}

TEST(Refused, WithAnyByteChanged) {
  const std::string good = TwoDevices().Saved();
  TwoDevices rig;
  for (size_t at = 0; at < good.size(); at += kOneIn) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ (1 << at % 8));
    const absl::Status status = rig.Restore(bad);
    ASSERT_TRUE(absl::IsDataLoss(status) || absl::IsFailedPrecondition(status))
        << "byte " << at << ": " << status;
    ASSERT_THAT(std::string(status.message()),
                AnyOf(HasSubstr("it is damaged in its "), HasSubstr("no snapshot of fp8kvd"),
                      HasSubstr("it has format ")))
        << at;
  }
  rig.ExpectNothingRestored();
  EXPECT_TRUE(rig.Restore(good).ok()) << "and the whole one is still taken";
}

TEST(Refused, WhereverItEnds) {
  const std::string good = TwoDevices().Saved();
  TwoDevices rig;
  for (size_t size = 0; size < good.size(); size += kOneIn) {
    const absl::Status status = rig.Restore(good.substr(0, size));
    ASSERT_TRUE(absl::IsDataLoss(status)) << size << ": " << status;
    ASSERT_THAT(std::string(status.message()), HasSubstr("it ends there")) << size;
  }
  const absl::Status longer = rig.Restore(good + "x");
  EXPECT_THAT(std::string(longer.message()), HasSubstr("more follows"));
  rig.ExpectNothingRestored();
}

// A frame is good in its place and in its file alone.
TEST(Refused, WithAPartFromElsewhere) {
  const std::string good = TwoDevices().Saved();
  const std::string other = TwoDevices().Saved(2000);
  ASSERT_EQ(good.size(), other.size());
  TwoDevices rig;
  // From the end on: 16 bytes of the end, pages of the second device, all of that device.
  for (const size_t bytes : {16U, 1000U, 6000U}) {
    std::string mixed = good;
    mixed.replace(good.size() - bytes, bytes, other, good.size() - bytes, bytes);
    EXPECT_TRUE(absl::IsDataLoss(rig.Restore(mixed))) << bytes;
  }
}

TEST(Refused, AnotherFormat) {
  std::string later = Saved();
  later[8] = 3;
  SnapshotRig rig(Options());
  EXPECT_THAT(
      std::string(rig.Restore(later).message()),
      HasSubstr("it has format 3, this fp8kvd reads 1 and 2; start the version that wrote it"));
  EXPECT_THAT(std::string(rig.Restore("models { name: \"m\" layers: 32 }").message()),
              HasSubstr("it is no snapshot of fp8kvd"));
}

// Signs a file anew after it was changed, as whoever forges one would: snapshot_format.h. Nothing
// where sizes lead beyond its end.
std::string Signed(std::string file) {
  const auto number = [&file](size_t at) {
    uint32_t value = 0;
    std::memcpy(&value, file.data() + at, sizeof(value));
    return value;
  };
  uint64_t check = XXH3_64bits(file.data(), 16);
  for (size_t at = 16; at < file.size();) {
    if (file.size() - at < 16 || file.size() - at - 16 < number(at + 4)) return "";
    const uint32_t bytes = number(at + 4);
    struct {
      uint32_t kind, bytes;
      uint64_t content;
    } const parts = {number(at), bytes, XXH3_64bits_withSeed(file.data() + at + 16, bytes, check)};
    check = XXH3_64bits(&parts, sizeof(parts));
    std::memcpy(file.data() + at + 8, &check, sizeof(check));
    at += 16 + bytes;
  }
  return file;
}

// Known fault: a size bomb in a snapshot. Checksums stop chance, not malice; what a signed file
// says is checked like any stranger's word.
TEST(Snapshot, AForgedOneIsRefusedOrHarmless) {
  const std::string good = TwoDevices().Saved();
  ASSERT_EQ(Signed(good), good);
  std::mt19937 random(1);
  int32_t refused = 0;
  int32_t taken = 0;
  for (int32_t i = 0; i < 2000; i += kOneIn) {
    std::string forged = good;
    const size_t at =
        16 + random() % (good.size() - 20) / (1 + i % 4);  // words stand in front of pages
    const uint32_t values[] = {0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, uint32_t(random())};
    std::memcpy(forged.data() + at, &values[random() % 6], 1 + random() % 4);
    forged = Signed(forged);
    if (forged.empty()) continue;
    TwoDevices rig;
    if (!rig.Restore(forged).ok()) {
      ++refused;
      rig.ExpectNothingRestored();
      continue;
    }
    ++taken;  // a time, a digest, a byte of a page
    rig.clock.AdvanceUs(int64_t{40} * 24 * 3600 * 1'000'000);
    rig.Settle();  // all leases end
    const engine::EngineStats stats = rig.fleet->stats();
    EXPECT_EQ(stats.seqs, 0);
    for (const engine::PoolStats& pool : stats.pools) EXPECT_EQ(pool.pages_used, 0);
  }
  EXPECT_GT(refused, 200 / kOneIn);
  EXPECT_GT(taken, 20 / kOneIn);
}

// Where a part of the file begins, of a kind that is in it more than once.
size_t PartAt(const std::string& file, uint32_t kind, int32_t number) {
  size_t at = 16;
  for (uint32_t before = 0; at + 16 <= file.size();) {
    uint32_t head[2];
    std::memcpy(head, file.data() + at, sizeof(head));
    if (head[0] == kind && before != kind && number-- == 0) return at;
    before = head[0];
    at += 16 + head[1];
  }
  return file.size();
}

// Known fault: a restore that reports success and restores a part.
TEST(Refused, WithAnotherNumberOfDevices) {
  const std::string two = TwoDevices().Saved();
  for (const int32_t devices : {1, 3}) {
    TwoDevices rig(devices);
    const absl::Status status = rig.Restore(two);
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("it is of 2 devices, here are " + std::to_string(devices) +
                          "; start with as many as wrote it (devices)"));
    rig.ExpectNothingRestored();
  }
}

// Parts of a signed file: one too few, one too many, one twice, those of two runs.
TEST(Refused, WithForgedParts) {
  const std::string good = TwoDevices().Saved();
  const size_t first = PartAt(good, 2, 0);
  const size_t second = PartAt(good, 2, 1);
  const size_t end = PartAt(good, 4, 0);
  ASSERT_LT(first, second);
  ASSERT_LT(second, end);
  const std::string part = good.substr(second, end - second);
  std::string of_another_run = good;
  of_another_run[second + 24] = static_cast<char>(of_another_run[second + 24] ^ 1);  // incarnation
  const std::pair<std::string, const char*> cases[] = {
      {good.substr(0, second) + good.substr(end), "it is damaged in its sequences"},
      {good.substr(0, end) + part + good.substr(end), "it is damaged in its end"},
      {good.substr(0, first) + good.substr(second, end - second) + good.substr(end),
       "it is damaged in its sequences"},
      {of_another_run, "its devices are of several runs"}};
  TwoDevices rig;
  for (const auto& [forged, said] : cases) {
    EXPECT_THAT(std::string(rig.Restore(Signed(forged)).message()), HasSubstr(said));
    rig.ExpectNothingRestored();
  }
  // The count alone, in the last bytes of the head.
  for (const uint32_t devices : {0U, 1U, 3U, 0xFFFFFFFFU}) {
    std::string forged = good;
    std::memcpy(forged.data() + first - sizeof(devices), &devices, sizeof(devices));
    EXPECT_THAT(std::string(rig.Restore(Signed(forged)).message()),
                HasSubstr("it is of " + std::to_string(devices) + " devices, here are 2"));
    rig.ExpectNothingRestored();
  }
  EXPECT_TRUE(rig.Restore(good).ok());
}

// Bounds are of all devices together: each would have room for its own.
TEST(Refused, WithMoreSequencesThanAllMayHave) {
  const std::string six = TwoDevices().Saved();
  TwoDevices rig(2, /*seqs_max=*/5);
  EXPECT_THAT(std::string(rig.Restore(six).message()),
              HasSubstr("seqs_max is 5, 6 sequences are in it"));
  rig.ExpectNothingRestored();
}

// So that versions that know one device and those that know several read each other's.
TEST(Snapshot, OfOneDeviceIsOfTheFirstFormat) {
  const std::string one = Saved();
  EXPECT_EQ(one[8], 1);
  EXPECT_EQ(TwoDevices().Saved()[8], 2);
  TwoDevices several;
  EXPECT_THAT(std::string(several.Restore(one).message()),
              HasSubstr("it is of 1 devices, here are 2"));
  several.ExpectNothingRestored();
}

// The snapshot is as good as before: whoever has it gives it back (snapshot_keeper.h).
TEST(Snapshot, ADeviceThatFailsWhileItLoadsHasFailed) {
  const std::string good = TwoDevices().Saved();
  const auto restored = [&](int64_t calls) {
    TwoDevices rig;
    rig.backends[1].FailCall(calls);
    const absl::Status status = rig.Restore(good);
    EXPECT_EQ(status.ok(), !rig.fleet->stats().failed) << status;
    return status.ok();
  };
  int64_t calls = 0;
  while (calls < 100 && !restored(calls)) ++calls;
  EXPECT_EQ(calls, 5) << "pages of three pools, tables of two sequences";
}

struct Foreign {
  const char* name;
  std::function<void(RigOptions& options)> change;
  const char* said;
};

class RefusedAsForeign : public ::testing::TestWithParam<Foreign> {};

TEST_P(RefusedAsForeign, ByName) {
  const std::string snapshot = Saved();
  RigOptions options = Options();
  GetParam().change(options);
  SnapshotRig rig(options);
  const absl::Status status = rig.Restore(snapshot);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().said));
  ExpectNothingRestored(&rig);
}

INSTANTIATE_TEST_SUITE_P(
    Because, RefusedAsForeign,
    ::testing::Values(
        Foreign{"model", [](RigOptions& o) { o.models[1].name = "q"; },
                "model n, layers is 2 in it, and unknown here"},
        Foreign{"layers",
                [](RigOptions& o) {
                  o.models[1].windows = {0, 0, 0};
                },
                "model n, layers is 2 in it, and 3 here"},
        Foreign{"window",
                [](RigOptions& o) {
                  o.models[0].windows = {0, 33};
                },
                "model m, layer group 1, window is 32 in it, and 33 here"},
        Foreign{"group_of_layers",
                [](RigOptions& o) {
                  o.models[0].windows = {32, 0};
                },
                "model m, layer group 0, window is 0 in it, and 32 here"},
        Foreign{"head_dim", [](RigOptions& o) { o.models[1].head_dim = 8; },
                "model n, layer group 0, head_dim is 4 in it, and 8 here"},
        Foreign{"kv_heads", [](RigOptions& o) { o.models[1].kv_heads = 2; },
                "model n, q_heads is 2 in it, and 4 here"},
        Foreign{"precision", [](RigOptions& o) { o.models[0].precision = Precision::kFp8Kv; },
                "model m, layer group 0, precision is bf16 in it, and fp8_kv here"},
        Foreign{"slack", [](RigOptions& o) { o.cache.reclaim_slack_tokens = 17; },
                "reclaim_slack_tokens is 16 in it, and 17 here"},
        Foreign{"room", [](RigOptions& o) { o.models[1].pages = 1; },
                "model n, layer group 0: 2 pages are in it, the pool has 1"},
        Foreign{"seqs_max", [](RigOptions& o) { o.cache.seqs_max = 2; }, "seqs_max is 2"},
        Foreign{
            "tenant",
            [](RigOptions& o) {
              o.tenants = {
                  {.name = "a", .pages_share_max = 1.0, .seqs_max = 9, .inflight_items_max = 9}};
            },
            "tenant default has sequences in it and is unknown here"}),
    [](const auto& foreign) { return std::string(foreign.param.name); });

TEST(Snapshot, TakesModelsInAnotherOrderAndBesideNewOnes) {
  const std::string snapshot = Saved();
  RigOptions options = Options();
  std::swap(options.models[0], options.models[1]);
  options.models.push_back(ModelSpec{.name = "new"});
  options.models[0].pages = 99;
  SnapshotRig rig(options);
  const absl::Status status = rig.Restore(snapshot);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(rig.engine->stats().seqs, 3);
}

// A device that lays its pages out another way, or writes them otherwise.
class OtherLayout final : public FakeBackend {
 public:
  absl::Status Append(const kernels::AppendParams& params) override {
    kernels::AppendRow swapped = params.rows[0];
    std::swap(swapped.k, swapped.v);
    kernels::AppendParams other = params;
    other.rows = &swapped;
    return FakeBackend::Append(other);
  }
};

TEST(Facts, KnowALayoutByTheBytesThatItGives) {
  const std::vector<engine::ModelSetup> models = {MakeModel({})};
  FakeBackend device;
  FakeBackend same;
  OtherLayout other;
  const auto facts = *engine::MakeFacts(models, {}, &device);
  EXPECT_TRUE(engine::CompareFacts(facts, *engine::MakeFacts(models, {}, &same)).ok());
  const absl::Status status = engine::CompareFacts(facts, *engine::MakeFacts(models, {}, &other));
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("model m, layer group 0, layout of a block is "));
}

}  // namespace
}  // namespace fp8kvd::testing
