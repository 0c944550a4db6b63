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

std::string Saved(const RigOptions& options = Options()) {
  SnapshotRig rig(options);
  const cache::SeqHandle parent = rig.Create(1, 0, 0)[0];
  rig.Fill(parent, 0, 70, 1000, 0);
  ControlCall fork(rig.engine, engine::ControlRequest::Op::kFork);
  fork.request.handles = {parent};
  fork.request.count = 1;
  rig.Run(fork);
  rig.Fill(rig.Create(1, 0, 1)[0], 0, 70, 5000, 1);
  return rig.DrainAndSave();
}

// The engine has nothing of what was refused.
void ExpectNothingRestored(SnapshotRig* rig) {
  EXPECT_EQ(rig->engine->stats().seqs, 0);
  EXPECT_EQ(rig->PagesUsed(), 0);
  EXPECT_EQ(rig->engine->incarnation(), 7U);
}

TEST(Refused, WithAnyByteChanged) {
  const std::string good = Saved();
  SnapshotRig rig(Options());
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
  ExpectNothingRestored(&rig);
  EXPECT_TRUE(rig.Restore(good).ok()) << "and the whole one is still taken";
}

TEST(Refused, WhereverItEnds) {
  const std::string good = Saved();
  SnapshotRig rig(Options());
  for (size_t size = 0; size < good.size(); size += kOneIn) {
    const absl::Status status = rig.Restore(good.substr(0, size));
    ASSERT_TRUE(absl::IsDataLoss(status)) << size << ": " << status;
    ASSERT_THAT(std::string(status.message()), HasSubstr("it ends there")) << size;
  }
  const absl::Status longer = rig.Restore(good + "x");
  EXPECT_THAT(std::string(longer.message()), HasSubstr("more follows"));
  ExpectNothingRestored(&rig);
}

// A frame is good in its place and in its file alone.
TEST(Refused, WithAPartFromElsewhere) {
  const std::string good = Saved();
  RigOptions options = Options();
  options.cache.lease_ttl_ms = 1001;
  const std::string other = Saved(options);
  ASSERT_EQ(good.size(), other.size());
  SnapshotRig rig(Options());
  // From the end on: 16 bytes of the end, then pages that are the same in both.
  for (const size_t bytes : {16, 3000}) {
    std::string mixed = good;
    mixed.replace(good.size() - bytes, bytes, other, good.size() - bytes, bytes);
    EXPECT_TRUE(absl::IsDataLoss(rig.Restore(mixed))) << bytes;
  }
}

TEST(Refused, AnotherFormat) {
  std::string later = Saved();
  later[8] = 2;
  SnapshotRig rig(Options());
  EXPECT_THAT(std::string(rig.Restore(later).message()),
              HasSubstr("it has format 2, this fp8kvd reads 1; start the version that wrote it"));
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
  const std::string good = Saved();
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
    SnapshotRig rig(Options());
    if (!rig.Restore(forged).ok()) {
      ++refused;
      ExpectNothingRestored(&rig);
      continue;
    }
    ++taken;  // a time, a digest, a byte of a page
    rig.clock.AdvanceUs(int64_t{40} * 24 * 3600 * 1'000'000);
    rig.Settle();  // all leases end
    EXPECT_EQ(rig.engine->stats().seqs, 0);
    EXPECT_EQ(rig.PagesUsed(), 0);
  }
  EXPECT_GT(refused, 200 / kOneIn);
  EXPECT_GT(taken, 20 / kOneIn);
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
