// Formulas worked by hand: the numbers below are written out, never recomputed by the code under
// test.
#include "config/cache_share.h"

#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/model.h"

namespace fp8kvd::config {
namespace {

using ::testing::HasSubstr;

// Llama 3.1 8B: 32 layers x 2 x 8 x 128 x 2 B = 131,072 bytes of K and V per token.
ModelOptions Llama() {
  ModelOptions options;
  options.name = "llama";
  options.layers = 32;
  options.q_heads = 32;
  options.kv_heads = 8;
  options.head_dim = 128;
  return options;
}

// Four layers of 2 x 1 x 64 x 2 B = 256 bytes per token, two of them with a window of 100.
ModelOptions Windowed() {
  ModelOptions options;
  options.name = "windowed";
  options.layers = 4;
  options.q_heads = 1;
  options.kv_heads = 1;
  options.head_dim = 64;
  options.layer_rules = {{.layers = "0,1", .window = 100, .softcap = {}, .has_sinks = {}}};
  return options;
}

ModelGeometry Fp8Geometry(const ModelOptions& options) {
  const auto geometry = MakeGeometry(options, Precision::kFp8Kv);
  EXPECT_TRUE(geometry.ok()) << geometry.status();
  return geometry.value_or(ModelGeometry{});
}

PolicyOptions Allowed() {
  PolicyOptions policy;
  policy.allow_fp8_kv = true;
  return policy;
}

PrecisionDecision Decided(const ModelOptions& options, const Workload& workload,
                          const PolicyOptions& policy,
                          PrecisionChoice choice = PrecisionChoice::kAuto,
                          const Calibration* calibration = nullptr) {
  const auto decision =
      DecidePrecision(Fp8Geometry(options), choice, workload, policy, calibration);
  EXPECT_TRUE(decision.ok()) << decision.status();
  return decision.value_or(PrecisionDecision{});
}

TEST(KvCacheShare, IsTheCachesPartOfAllBytesOfAStep) {
  // 32 x 8192 x 131,072 = 34,359,738,368 bytes beside 16,000,000,000: 0.68228...
  EXPECT_DOUBLE_EQ(kv_cache_share(32, 8192, 32, 8, 128, 16'000'000'000),
                   34'359'738'368.0 / 50'359'738'368.0);
  EXPECT_NEAR(kv_cache_share(32, 8192, 32, 8, 128, 16'000'000'000), 0.682286, 1e-6);
  // 1 x 1 x 1 x 2 x 1 x 1 x 2 B = 4 bytes beside 12.
  EXPECT_DOUBLE_EQ(kv_cache_share(1, 1, 1, 1, 1, 12), 0.25);
}

TEST(KvCacheShare, WithoutOtherBytesIsOneAndWithoutAnyIsZero) {
  EXPECT_EQ(kv_cache_share(1, 1, 1, 1, 64, 0), 1.0);
  EXPECT_EQ(kv_cache_share(0, 8192, 32, 8, 128, 0), 0.0);
  EXPECT_EQ(kv_cache_share(0, 8192, 32, 8, 128, 16), 0.0);
}

TEST(KvCacheShare, HugeNumbersDoNotOverflowAndNegativeOnesCountAsZero) {
  const int64_t huge = std::numeric_limits<int64_t>::max();
  EXPECT_DOUBLE_EQ(kv_cache_share(huge, huge, 512, 256, 256, huge), 1.0);
  EXPECT_EQ(kv_cache_share(-1, -1, 1, 1, 64, 16), 0.0);
  EXPECT_EQ(kv_cache_share(1, 1, 1, 1, 64, -5), 1.0);
}

TEST(PredictedSpeedup, FollowsTheFormula) {
  EXPECT_NEAR(PredictedSpeedup(0.2, 0.53), 1.1038, 1e-4);  // 1 / (1 - 0.2 x 0.47)
  EXPECT_DOUBLE_EQ(PredictedSpeedup(1.0, 0.5), 2.0);
  EXPECT_DOUBLE_EQ(PredictedSpeedup(0.5, 1.5), 0.8);  // slower attention slows the step
  EXPECT_DOUBLE_EQ(PredictedSpeedup(0.0, 0.5), 1.0);
}

TEST(BytesRatio, IsCodesAndScalesOverRows) {
  EXPECT_DOUBLE_EQ(BytesRatio(128), 132.0 / 256.0);
  EXPECT_DOUBLE_EQ(BytesRatio(64), 68.0 / 128.0);
  EXPECT_DOUBLE_EQ(BytesRatio(256), 260.0 / 512.0);
}

TEST(KvBytesRead, AWindowLimitsWhatItsLayersRead) {
  const ModelGeometry geometry = Fp8Geometry(Windowed());
  // 3 x (2 x 100 + 2 x 1000) x 256 B, and 3 x 2200 x (2 x 64 + 8) B as fp8_kv.
  EXPECT_EQ(KvBytesReadBf16(geometry, 3, 1000), 1'689'600);
  EXPECT_EQ(KvBytesRead(geometry, 3, 1000), 897'600);
  // Below the window all four read every token: 3 x 4 x 50 x 256.
  EXPECT_EQ(KvBytesReadBf16(geometry, 3, 50), 153'600);
}

TEST(Decide, AutoTakesFp8KvAtTheLeastShareAndBf16BelowIt) {
  // 1000 tokens x 4 layers x 256 bytes = 1,024,000.
  ModelOptions model = Windowed();
  model.layer_rules.clear();
  const Workload at = {.batch = 1, .tokens = 1000, .other_bytes = 4'096'000};  // share 0.2
  EXPECT_EQ(Decided(model, at, Allowed()).cache_share, 0.2);
  EXPECT_EQ(Decided(model, at, Allowed()).precision, Precision::kFp8Kv);
  const Workload below = {.batch = 1, .tokens = 1000, .other_bytes = 4'096'001};
  EXPECT_EQ(Decided(model, below, Allowed()).precision, Precision::kBf16);
}

TEST(Decide, WithoutTheOptInAutoIsBf16WhateverTheShare) {
  const Workload workload = {.batch = 32, .tokens = 8192, .other_bytes = 0};
  const PrecisionDecision decision = Decided(Llama(), workload, PolicyOptions());
  EXPECT_EQ(decision.precision, Precision::kBf16);
  EXPECT_THAT(decision.reason, HasSubstr("allow_fp8_kv is false"));
  EXPECT_DOUBLE_EQ(decision.predicted_speedup, 256.0 / 132.0);  // still told
}

TEST(Decide, Fp8KvWithoutTheOptInIsAnErrorThatSaysHowToOptIn) {
  const auto decision =
      DecidePrecision(Fp8Geometry(Llama()), PrecisionChoice::kFp8Kv,
                      {.batch = 1, .tokens = 1, .other_bytes = 0}, PolicyOptions(), nullptr);
  ASSERT_EQ(decision.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(decision.status().message()),
              HasSubstr("model \"llama\": precision fp8_kv is lossy and needs the opt-in"));
  EXPECT_THAT(std::string(decision.status().message()), HasSubstr("--allow_fp8_kv"));
}

TEST(Decide, AnExplicitChoiceIsKeptAgainstTheShare) {
  const Workload small = {.batch = 1, .tokens = 10, .other_bytes = 1e12};
  EXPECT_EQ(Decided(Llama(), small, Allowed(), PrecisionChoice::kFp8Kv).precision,
            Precision::kFp8Kv);
  const Workload large = {.batch = 64, .tokens = 100000, .other_bytes = 1};
  EXPECT_EQ(Decided(Llama(), large, Allowed(), PrecisionChoice::kBf16).precision, Precision::kBf16);
}

TEST(Decide, ZeroOtherBytesIsAShareOfOne) {
  const Workload workload = {.batch = 1, .tokens = 8192, .other_bytes = 0};
  const PrecisionDecision decision = Decided(Llama(), workload, Allowed());
  EXPECT_EQ(decision.cache_share, 1.0);
  EXPECT_EQ(decision.precision, Precision::kFp8Kv);
}

TEST(Decide, UnknownOtherBytesIsNotZero) {
  const Workload workload = {.batch = 32, .tokens = 8192, .other_bytes = std::nullopt};
  const PrecisionDecision decision = Decided(Llama(), workload, Allowed());
  EXPECT_EQ(decision.precision, Precision::kBf16);
  EXPECT_THAT(decision.reason, HasSubstr("other_bytes is unknown"));
}

TEST(Decide, TensOfTokensAreBf16) {
  // A weight-heavy step: 77 x 131,072 = 10 MB beside 16 GB.
  const Workload weights = {.batch = 1, .tokens = 77, .other_bytes = 16e9};
  EXPECT_EQ(Decided(Llama(), weights, Allowed()).precision, Precision::kBf16);
  // Nothing but the cache, but bound by latency, and nobody measured.
  const Workload cache_only = {.batch = 1, .tokens = 77, .other_bytes = 0};
  const PrecisionDecision decision = Decided(Llama(), cache_only, Allowed());
  EXPECT_EQ(decision.precision, Precision::kBf16);
  EXPECT_THAT(decision.reason, HasSubstr("bound by latency"));
  // Measured there at 0.90x: r = 1.111.
  PolicyOptions measured = Allowed();
  measured.fp8_bf16_ratio = 1.111;
  EXPECT_THAT(Decided(Llama(), cache_only, measured).reason, HasSubstr("not faster"));
}

TEST(Decide, AGivenRatioReplacesTheBytesRatio) {
  PolicyOptions measured = Allowed();
  measured.fp8_bf16_ratio = 0.53;
  const Workload workload = {.batch = 32, .tokens = 8192, .other_bytes = 16e9};
  const PrecisionDecision decision = Decided(Llama(), workload, measured);
  EXPECT_EQ(decision.ratio_source, RatioSource::kGiven);
  EXPECT_NEAR(decision.predicted_speedup, 1.4720, 1e-4);  // 1 / (1 - 0.682286 x 0.47)
  EXPECT_NEAR(decision.attention_speedup, 1.8868, 1e-4);  // 1 / 0.53
  EXPECT_EQ(Decided(Llama(), workload, Allowed()).ratio_source, RatioSource::kBytes);
  EXPECT_DOUBLE_EQ(Decided(Llama(), workload, Allowed()).ratio, 132.0 / 256.0);
}

TEST(Decide, LayersThatStayBf16LeaveTheShareThatDecides) {
  ModelOptions model = Windowed();
  model.layer_rules.clear();
  model.bf16_layers = "0";
  // 1,024,000 bytes of cache, three quarters of them convertible, beside 2,816,000: 0.2667 and 0.2.
  const Workload workload = {.batch = 1, .tokens = 1000, .other_bytes = 2'816'000};
  const PrecisionDecision decision = Decided(model, workload, Allowed());
  EXPECT_NEAR(decision.cache_share, 0.266667, 1e-6);
  EXPECT_EQ(decision.convertible_share, 0.2);
  EXPECT_EQ(decision.precision, Precision::kFp8Kv);
  // 1 / (1 - 0.2 x (1 - 68/128)) and, of attention, 1 / (1 - 0.75 x (1 - 68/128)).
  EXPECT_NEAR(decision.predicted_speedup, 1.103448, 1e-6);
  EXPECT_NEAR(decision.attention_speedup, 1.542169, 1e-6);
  EXPECT_EQ(decision.kv_bytes_fp8_kv, 1000 * (256 + 3 * 136));

  model.bf16_layers = "0-3";
  EXPECT_THAT(Decided(model, workload, Allowed()).reason, HasSubstr("could be fp8_kv"));
}

TEST(Decide, AWindowKeepsALongContextBelowTheShare) {
  ModelOptions model = Windowed();
  model.window = 100;  // all layers
  model.layer_rules.clear();
  // However long: 4 x 100 x 256 = 102,400 bytes beside 1,024,000: 0.0909.
  const Workload workload = {.batch = 1, .tokens = 1'000'000, .other_bytes = 1'024'000};
  const PrecisionDecision decision = Decided(model, workload, Allowed());
  EXPECT_NEAR(decision.cache_share, 1.0 / 11, 1e-12);
  EXPECT_EQ(decision.precision, Precision::kBf16);
}

TEST(Decide, AHugeBatchIsFiniteAndFp8Kv) {
  const int64_t huge = std::numeric_limits<int64_t>::max();
  const Workload workload = {.batch = huge, .tokens = huge, .other_bytes = 16e9};
  const PrecisionDecision decision = Decided(Llama(), workload, Allowed());
  EXPECT_TRUE(std::isfinite(decision.kv_bytes));
  EXPECT_DOUBLE_EQ(decision.predicted_speedup, 256.0 / 132.0);
  EXPECT_EQ(decision.precision, Precision::kFp8Kv);
}

TEST(Decide, TheReasonHoldsEveryNumber) {
  const Workload workload = {.batch = 32, .tokens = 8192, .other_bytes = 16e9};
  const std::string reason = Decided(Llama(), workload, Allowed()).reason;
  EXPECT_EQ(
      reason,
      "fp8_kv because the cache's share reaches cache_share_min and r < 1: batch 32 x 8192 "
      "tokens read 3.436e+10 bytes of K and V and 1.6e+10 others, cache_share 0.6823, "
      "cache_share_min 0.2, r 0.5156 (bytes), predicted step speed-up 1.494x, attention alone "
      "1.939x, with the calls' cost unknown (calibrate, or set rpc_us and read_gb_s)");
}

// One query head per KV head: r 1.2 at 64 tokens, 0.6 at 1,024 and 0.5 for 16 sequences of 1,024.
Calibration Measured() {
  Calibration calibration;
  calibration.version = "1";
  calibration.device_name = "device";
  calibration.read_bytes_per_s = 1.024e9;
  calibration.points = {{64, 1, 1, 1, 64, 10, 12},
                        {64, 1, 1, 1, 1024, 100, 60},
                        {64, 1, 1, 16, 64, 40, 40},
                        {64, 1, 1, 16, 1024, 1000, 500},
                        {128, 8, 1, 1, 64, 10, 99}};
  return calibration;
}

LayerGroup OneHead(int32_t head_dim) {
  return {.kv_heads = 1,
          .head_dim = head_dim,
          .window = 0,
          .precision = Precision::kFp8Kv,
          .layers = {0}};
}

TEST(MeasuredRatio, IsThatOfThePointsAndTheGeometricMeanBetweenThem) {
  const Calibration measured = Measured();
  EXPECT_NEAR(*MeasuredRatio(measured, OneHead(64), 1, 1, 64), 1.2, 1e-12);
  EXPECT_NEAR(*MeasuredRatio(measured, OneHead(64), 1, 16, 1024), 0.5, 1e-12);
  // 256 is half of the way from 64 to 1,024, 4 from 1 to 16: sqrt(1.2 x 0.6), sqrt(0.6 x 0.5).
  EXPECT_NEAR(*MeasuredRatio(measured, OneHead(64), 1, 1, 256), std::sqrt(0.72), 1e-12);
  EXPECT_NEAR(*MeasuredRatio(measured, OneHead(64), 1, 4, 1024), std::sqrt(0.30), 1e-12);
}

TEST(MeasuredRatio, BeyondTheOutermostPointItIsThatPoints) {
  EXPECT_NEAR(*MeasuredRatio(Measured(), OneHead(64), 1, 1, 1), 1.2, 1e-12);
  EXPECT_NEAR(*MeasuredRatio(Measured(), OneHead(64), 1, 9999, 99999), 0.5, 1e-12);
  EXPECT_NEAR(*MeasuredRatio(Measured(), OneHead(64), 1, 0, 0), 1.2, 1e-12);
}

TEST(MeasuredRatio, AnotherNumberOfKvHeadsIsAnotherBatch) {
  LayerGroup heads = OneHead(64);
  heads.kv_heads = 16;  // one sequence of 16 heads reads what 16 of one head do
  EXPECT_NEAR(*MeasuredRatio(Measured(), heads, 1, 1, 1024), 0.5, 1e-12);
}

TEST(MeasuredRatio, IsUnknownForAShapeThatWasNotMeasured) {
  EXPECT_FALSE(MeasuredRatio(Measured(), OneHead(64), 2, 1, 64).has_value());
  EXPECT_FALSE(MeasuredRatio(Measured(), OneHead(80), 1, 1, 64).has_value());
}

TEST(Decide, ACalibratedRatioGoesBeforeAGivenOneAndFollowsTheContext) {
  ModelOptions model = Windowed();
  model.layer_rules.clear();
  const Calibration measured = Measured();
  PolicyOptions policy = Allowed();
  policy.fp8_bf16_ratio = 0.53;
  const auto at = [&](int64_t tokens) {
    return Decided(model, {.batch = 1, .tokens = tokens, .other_bytes = 0}, policy,
                   PrecisionChoice::kAuto, &measured);
  };
  EXPECT_NEAR(at(1024).ratio, 0.6, 1e-12);
  EXPECT_EQ(at(1024).ratio_source, RatioSource::kMeasured);
  EXPECT_EQ(at(1024).precision, Precision::kFp8Kv);
  // Tens of tokens: nothing but the cache is read, and still bf16 wins, as measured.
  EXPECT_NEAR(at(64).ratio, 1.2, 1e-12);
  EXPECT_EQ(at(64).precision, Precision::kBf16);
  EXPECT_THAT(at(64).reason, HasSubstr("not faster"));
  EXPECT_THAT(at(64).reason, HasSubstr("r 1.2000 (measured)"));
}

TEST(Decide, AGivenRatioStandsInForAShapeThatWasNotCalibrated) {
  PolicyOptions policy = Allowed();
  policy.fp8_bf16_ratio = 0.53;
  const Calibration measured = Measured();
  const PrecisionDecision decision = Decided(Llama(), {.batch = 1, .tokens = 64, .other_bytes = 0},
                                             policy, PrecisionChoice::kAuto, &measured);
  EXPECT_EQ(decision.ratio, 0.53);
  EXPECT_EQ(decision.ratio_source, RatioSource::kGiven);
}

TEST(Decide, GroupsThatSeeUnequalContextsCountByTheirBytes) {
  ModelOptions model = Windowed();
  model.layer_rules[0].window = 64;  // layers 0 and 1
  const Calibration measured = Measured();
  const PrecisionDecision decision = Decided(model, {.batch = 1, .tokens = 1024, .other_bytes = 0},
                                             Allowed(), PrecisionChoice::kAuto, &measured);
  // 2 x 64 tokens at 1.2 and 2 x 1,024 at 0.6: (64 x 1.2 + 1,024 x 0.6) / 1,088.
  EXPECT_NEAR(decision.ratio, 0.6352941176, 1e-9);
}

TEST(Decide, CallsAreCountedWithWhatTheCalibrationKnowsAndTheOperatorGives) {
  ModelOptions model = Windowed();
  model.layer_rules.clear();
  const Workload workload = {.batch = 1, .tokens = 1024, .other_bytes = 1024 * 1024};
  Calibration measured = Measured();
  PolicyOptions policy = Allowed();
  EXPECT_FALSE(Decided(model, workload, policy, PrecisionChoice::kAuto, &measured)
                   .speedup_with_calls.has_value());
  measured.call_us = 256;
  // 2 MiB at 1.024e9 B/s are 2,048 us, of which r 0.6 saves 409.6; four calls add 1,024.
  EXPECT_NEAR(
      *Decided(model, workload, policy, PrecisionChoice::kAuto, &measured).speedup_with_calls,
      3072.0 / 2662.4, 1e-9);
  policy.rpc_us = 512;
  policy.read_gb_s = 0.512;  // 4,096 us, 819.2 saved, 2,048 for the calls
  const PrecisionDecision decision =
      Decided(model, workload, policy, PrecisionChoice::kAuto, &measured);
  EXPECT_NEAR(*decision.speedup_with_calls, 6144.0 / 5324.8, 1e-9);
  EXPECT_THAT(decision.reason,
              HasSubstr("step with a call of 512 us a layer at 0.512 GB/s 1.154x"));
}

TEST(Calibration, AFileReadsAsItWasWritten) {
  Calibration written = Measured();
  written.device_name = "a \"quoted\" name";
  written.call_us = 123.5;
  const auto read = ParseCalibration(FormatCalibration(written));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(FormatCalibration(*read), FormatCalibration(written));
  EXPECT_EQ(read->points.size(), 5u);
  EXPECT_EQ(read->device_name, written.device_name);
  EXPECT_TRUE(read->Fits("1", written.device_name));
  EXPECT_FALSE(read->Fits("2", written.device_name));
  EXPECT_FALSE(read->Fits("1", "device"));
}

TEST(Calibration, AFileThatIsNoneIsRefusedWithItsLine) {
  for (const char* text :
       {"", "[]", "{}", R"({"version": "1"})",
        R"({"version": "1", "device_name": "d", "read_bytes_per_s": -1, "points": []})",
        R"({"version": "1", "device_name": "d", "read_bytes_per_s": 1, "points": [{}]})",
        R"({"version": "1", "device_name": "d", "read_bytes_per_s": 1, "points": [{"head_dim": 64,
            "group": 1, "kv_heads": 1, "batch": 1, "tokens": 1, "bf16_us": 0,
            "fp8_kv_us": 1}]})"}) {
    const auto read = ParseCalibration(text);
    EXPECT_EQ(read.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(read.status().message()), HasSubstr("line ")) << text;
  }
}

TEST(SpeedupWithCalls, CallsTakeTheirPartOfTheGain) {
  ModelOptions model = Windowed();
  model.layer_rules.clear();
  // 1,024,000 bytes of cache and as many others at 1.024e9 B/s: 2 ms, of which r 0.5 saves 0.5 ms.
  PolicyOptions measured = Allowed();
  measured.fp8_bf16_ratio = 0.5;
  const PrecisionDecision decision =
      Decided(model, {.batch = 1, .tokens = 1000, .other_bytes = 1'024'000}, measured);
  EXPECT_NEAR(decision.predicted_speedup, 2.0 / 1.5, 1e-12);
  EXPECT_NEAR(*SpeedupWithCalls(decision, 4, 0, 1.024e9), 2.0 / 1.5, 1e-12);
  // Four layers at 500 us add 2 ms to both.
  EXPECT_NEAR(*SpeedupWithCalls(decision, 4, 500, 1.024e9), 4.0 / 3.5, 1e-12);
  EXPECT_FALSE(SpeedupWithCalls(decision, 4, 500, 0).has_value());
}

TEST(CrossoverTokens, IsTheFirstLengthThatReachesTheShare) {
  ModelOptions model = Windowed();
  model.layer_rules.clear();
  // 1,024 bytes per token: 0.2 of all beside 4,096,000 from 1,000 tokens on.
  EXPECT_EQ(CrossoverTokens(Fp8Geometry(model), 1, 4'096'000, 0.2), 1000);
  EXPECT_EQ(CrossoverTokens(Fp8Geometry(model), 1, 4'096'001, 0.2), 1001);
  EXPECT_EQ(CrossoverTokens(Fp8Geometry(model), 0, 4'096'000, 0.2), std::nullopt);
  EXPECT_EQ(CrossoverTokens(Fp8Geometry(model), 1, 0, 0.2), 1);
}

TEST(CrossoverTokens, FindsAShareThatIsLeftAgainAtGreaterLengths) {
  ModelOptions model = Windowed();  // layers 0 and 1 see 100 tokens
  model.bf16_layers = "2,3";        // so what is convertible stops growing at 100
  // At t <= 100: 512 t of 1,024 t + 51,200; 0.25 is reached where 256 t = 12,800: 50 tokens.
  EXPECT_EQ(CrossoverTokens(Fp8Geometry(model), 1, 51'200, 0.25), 50);
}

TEST(PlanModel, TheGeometryHasTheDecidedPrecision) {
  ModelOptions model = Llama();
  model.expected_seqs = 32;
  model.expected_tokens = 8192;
  model.other_bytes = 16'000'000'000;
  model.bf16_layers = "0";
  const auto fp8 = PlanModel(model, Allowed(), nullptr);
  ASSERT_TRUE(fp8.ok()) << fp8.status();
  ASSERT_EQ(fp8->geometry.groups.size(), 2u);
  EXPECT_EQ(fp8->geometry.groups[1].precision, Precision::kFp8Kv);
  const auto bf16 = PlanModel(model, PolicyOptions(), nullptr);
  ASSERT_TRUE(bf16.ok()) << bf16.status();
  ASSERT_EQ(bf16->geometry.groups.size(), 1u);
  EXPECT_EQ(bf16->geometry.groups[0].precision, Precision::kBf16);
}

}  // namespace
}  // namespace fp8kvd::config
