// Natural batching over a recorded trace: decodes of two models of one kernel shape and a third of
// another arrive at random while a launch runs; when it ends, the next launch takes every one of
// them that the oldest's shape admits, and the one after it takes the rest. No timer, no item left.
#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"

#include "tests/engine/rig.h"

namespace fp8kvd::testing {
namespace {

constexpr int32_t kModels = 3;
constexpr int32_t kSeqs = 4;  // of each model
constexpr int32_t kLayers = 3;

class Trace {
 public:
  Trace() : rig_(Options()) {
    for (int32_t model = 0; model < kModels; ++model) {
      seqs_.push_back(rig_.Create(kSeqs, /*expected_tokens=*/0, model));
      lengths_.emplace_back(kSeqs * kLayers, 0);
    }
    rig_.backend.ForgetRecords();
  }

  // A launch that runs, arrivals meanwhile, and what follows: rows of each launch.
  void Round(std::minstd_rand& random) {
    rig_.backend.Hold();
    Submit(random);
    expected_.push_back(1);
    const auto arrivals = static_cast<int32_t>(random() % 24);
    int32_t of_shape[2] = {0, 0};
    int32_t first_shape = -1;
    for (int32_t i = 0; i < arrivals; ++i) {
      const int32_t shape = Submit(random) == 2 ? 1 : 0;
      if (first_shape < 0) first_shape = shape;
      ++of_shape[shape];
    }
    for (const int32_t shape : {first_shape, 1 - first_shape}) {
      if (first_shape >= 0 && of_shape[shape] > 0) expected_.push_back(of_shape[shape]);
    }
    rig_.backend.Release();
    rig_.Settle();
    for (const auto& call : calls_) EXPECT_TRUE(call->done() && call->items[0].status.ok());
    calls_.clear();
  }

  std::vector<int32_t> Launched() const {
    std::vector<int32_t> rows;
    for (const auto& record : rig_.backend.RecordsOf(FakeBackend::Record::Kind::kDecode)) {
      rows.push_back(record.count);
    }
    return rows;
  }
  const std::vector<int32_t>& expected() const { return expected_; }

 private:
  static RigOptions Options() {
    RigOptions options;
    options.engine.launches_inflight_max = 1;
    options.engine.batch_rows_max = 64;
    options.engine.staging_bytes = int64_t{8} << 20;  // a slot for each arrival of a round
    const std::vector<int32_t> windows(kLayers, 0);
    options.models = {ModelSpec{.name = "a", .windows = windows, .pages = 256},
                      ModelSpec{.name = "b", .windows = windows, .pages = 256},
                      ModelSpec{.name = "c", .windows = windows, .head_dim = 8, .pages = 256}};
    return options;
  }

  // The next token of some sequence and layer. Returns its model.
  int32_t Submit(std::minstd_rand& random) {
    const auto model = static_cast<int32_t>(random() % kModels);
    const auto seq = static_cast<int32_t>(random() % kSeqs);
    const auto layer = static_cast<int32_t>(random() % kLayers);
    const int64_t pos = lengths_[model][seq * kLayers + layer]++;
    calls_.push_back(std::make_unique<DecodeCall>(
        rig_.engine, model, layer,
        std::vector<ItemSpec>{Step(seqs_[model][seq], pos, 1000 + static_cast<uint64_t>(pos))}));
    rig_.Run(*calls_.back());
    return model;
  }

  Rig rig_;
  std::vector<std::vector<cache::SeqHandle>> seqs_;
  std::vector<std::vector<int64_t>> lengths_;
  std::vector<std::unique_ptr<DecodeCall>> calls_;
  std::vector<int32_t> expected_;
};

TEST(Trace, EachLaunchTakesAllThatWaitsOfItsShape) {
  std::minstd_rand random(7);
  Trace trace;
  for (int32_t round = 0; round < 40; ++round) trace.Round(random);
  EXPECT_EQ(trace.Launched(), trace.expected());
  EXPECT_GT(trace.expected().size(), 100u);  // both shapes came in most rounds
}

}  // namespace
}  // namespace fp8kvd::testing
