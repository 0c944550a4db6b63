#include "server/live_load.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "config/cache_share.h"

namespace fp8kvd {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class FakeClock : public engine::Clock {
 public:
  int64_t NowUs() const override { return now_us; }
  int64_t now_us = 0;
};

// Two layers of 2 x 1 x 64 x 2 B = 256 bytes a token, configured for 10 sequences of 1,000 tokens
// beside 512,000 bytes: 5,120,000 bytes of cache, a share of 10 / 11.
config::Loaded Configured(bool allow_fp8_kv, config::PrecisionChoice precision) {
  config::Loaded loaded;
  loaded.options.policy.allow_fp8_kv = allow_fp8_kv;
  loaded.options.policy.live_window_ms = 1000;
  config::ModelOptions model;
  model.name = "m";
  model.layers = 2;
  model.q_heads = 1;
  model.kv_heads = 1;
  model.head_dim = 64;
  model.expected_seqs = 10;
  model.expected_tokens = 1000;
  model.other_bytes = 512'000;
  model.precision = precision;
  loaded.options.models.push_back(model);
  const auto planned = config::PlanModel(model, loaded.options.policy, nullptr);
  EXPECT_TRUE(planned.ok()) << planned.status();
  if (planned.ok()) loaded.models.push_back(*planned);
  return loaded;
}

class LiveLoadTest : public testing::Test {
 protected:
  void Configure(bool allow_fp8_kv,
                 config::PrecisionChoice precision = config::PrecisionChoice::kAuto) {
    loaded = Configured(allow_fp8_kv, precision);
    stats.models.resize(1);
    live = std::make_unique<LiveLoad>(&loaded, &clock, [this] { return stats; });
  }
  // Whole steps of so many sequences, and the time that they take.
  void Serve(uint64_t steps, uint64_t seqs, uint64_t tokens, int64_t ms) {
    engine::ModelStats& model = stats.models[0];
    model.decode_requests_total += 2 * steps;
    model.decode_rows_total += 2 * steps * seqs;
    model.seq_tokens_total += 2 * steps * seqs * tokens;
    model.kv_bf16_bytes_read_total += 2 * steps * seqs * tokens * 256;
    clock.now_us += ms * 1000;
  }

  config::Loaded loaded;
  FakeClock clock;
  engine::EngineStats stats;
  std::unique_ptr<LiveLoad> live;
};

TEST_F(LiveLoadTest, ALoadAsConfiguredGivesNoHint) {
  Configure(/*allow_fp8_kv=*/true);
  ASSERT_EQ(loaded.models[0].decision.precision, Precision::kFp8Kv);
  Serve(/*steps=*/5, /*seqs=*/10, /*tokens=*/1000, /*ms=*/1000);
  EXPECT_THAT(live->Tick(), IsEmpty());
  const auto verdict = live->Of(0);
  ASSERT_TRUE(verdict.has_value());
  EXPECT_EQ(verdict->steps, 5);
  EXPECT_EQ(verdict->batch, 10);
  EXPECT_EQ(verdict->tokens, 1000);
  EXPECT_DOUBLE_EQ(verdict->cache_share, 10.0 / 11.0);
  EXPECT_FALSE(verdict->contradicts);
}

TEST_F(LiveLoadTest, ASmallLoadContradictsFp8Kv) {
  Configure(/*allow_fp8_kv=*/true);
  // 200 tokens x 512 B beside 512,000: a sixth.
  Serve(5, 1, 200, 1000);
  EXPECT_THAT(live->Tick(), ElementsAre(HasSubstr(
                                "model \"m\" is fp8_kv for the configured 10 x 1000 tokens, but "
                                "over 1 s it served 1 x 200 tokens a step: cache_share 0.1667")));
  EXPECT_THAT(live->Of(0)->hint, HasSubstr("expected_seqs: 1 expected_tokens: 200"));
}

TEST_F(LiveLoadTest, ALoadThatWouldPayIsToldToWhoeverHasNotOptedIn) {
  Configure(/*allow_fp8_kv=*/false);
  Serve(5, 10, 1000, 1000);
  EXPECT_THAT(live->Tick(), ElementsAre(HasSubstr("allow_fp8_kv: true")));
  EXPECT_EQ(live->Of(0)->decision.precision, Precision::kFp8Kv);
}

TEST_F(LiveLoadTest, AnExplicitBf16IsAWishAndNoContradiction) {
  Configure(/*allow_fp8_kv=*/true, config::PrecisionChoice::kBf16);
  Serve(5, 10, 1000, 1000);
  EXPECT_THAT(live->Tick(), IsEmpty());
}

TEST_F(LiveLoadTest, AHintComesOnceUntilTheLoadAgreedAgain) {
  Configure(/*allow_fp8_kv=*/true);
  Serve(5, 1, 200, 1000);
  EXPECT_EQ(live->Tick().size(), 1u);
  Serve(5, 1, 200, 1000);
  EXPECT_THAT(live->Tick(), IsEmpty());
  EXPECT_TRUE(live->Of(0)->contradicts);  // still told to whoever asks
  Serve(5, 10, 1000, 1000);
  EXPECT_THAT(live->Tick(), IsEmpty());
  EXPECT_FALSE(live->Of(0)->contradicts);
  Serve(5, 1, 200, 1000);
  EXPECT_EQ(live->Tick().size(), 1u);
}

TEST_F(LiveLoadTest, AWindowIsJudgedByItselfAndNotBeforeItsEnd) {
  Configure(/*allow_fp8_kv=*/true);
  Serve(5, 1, 200, 999);
  EXPECT_THAT(live->Tick(), IsEmpty());
  EXPECT_EQ(live->Of(0)->batch, 1);  // the open window, as long as no other is there
  Serve(0, 0, 0, 1);
  EXPECT_EQ(live->Tick().size(), 1u);
  Serve(100, 10, 1000, 500);
  EXPECT_EQ(live->Of(0)->batch, 1);
  EXPECT_THAT(live->Tick(/*last=*/true), IsEmpty());
  EXPECT_EQ(live->Of(0)->batch, 10);
}

TEST_F(LiveLoadTest, LessThanAStepSaysNothing) {
  Configure(/*allow_fp8_kv=*/true);
  EXPECT_FALSE(live->Of(0).has_value());
  stats.models[0].decode_requests_total = 1;  // of two layers
  stats.models[0].decode_rows_total = 1;
  clock.now_us = 5'000'000;
  EXPECT_THAT(live->Tick(), IsEmpty());
  EXPECT_FALSE(live->Of(0).has_value());
}

}  // namespace
}  // namespace fp8kvd
