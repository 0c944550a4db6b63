// fp8kvctl plan on real config.json files, against bytes worked by hand from their shapes.
#include <algorithm>
#include <iostream>
#include <sstream>

#include "gmock/gmock.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"
#include "gtest/gtest.h"

#include "client/cc/ctl/commands.h"

namespace fp8kvd::ctl {
namespace {

using testing::HasSubstr;
using Fields = google::protobuf::Map<std::string, google::protobuf::Value>;

struct Ran {
  int exit_code = 0;
  std::string out;
  std::string err;
};

Ran Plan(const std::string& model, std::vector<std::string> flags) {
  flags.insert(flags.begin(), {"plan", "--hf_config=tests/data/hf/" + model + ".json"});
  std::ostringstream out;
  std::ostringstream err;
  const int exit_code = RunCommandLine(flags, out, err);
  return {exit_code, out.str(), err.str()};
}

Fields PlanJson(const std::string& model, std::vector<std::string> flags) {
  flags.emplace_back("--json");
  const Ran ran = Plan(model, flags);
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.err;
  EXPECT_EQ(std::count(ran.out.begin(), ran.out.end(), '\n'), 1) << "one object on one line";
  google::protobuf::Struct object;
  EXPECT_TRUE(google::protobuf::util::JsonStringToMessage(ran.out, &object).ok()) << ran.out;
  return object.fields();
}

struct ByHand {
  const char* model;
  double tokens_x_layers;  // of one sequence of 8,192 tokens, each layer up to its window
  double row_bytes;        // of K and V in bf16, one token of one layer
};

class Models : public testing::TestWithParam<ByHand> {};

TEST_P(Models, HaveTheCacheBytesOfTheirShape) {
  const Fields plan = PlanJson(GetParam().model, {"--batch=32", "--tokens=8192"});
  EXPECT_EQ(plan.at("kv_bytes").number_value(),
            32 * GetParam().tokens_x_layers * GetParam().row_bytes);
}

INSTANTIATE_TEST_SUITE_P(
    Plan, Models,
    testing::Values(ByHand{"llama_3_1_8b", 32 * 8192., 2 * 8 * 128 * 2},
                    ByHand{"llama_3_1_70b", 80 * 8192., 2 * 8 * 128 * 2},
                    ByHand{"qwen2_5_7b", 28 * 8192., 2 * 4 * 128 * 2},
                    ByHand{"gemma_3_27b", 10 * 8192. + 52 * 1024., 2 * 16 * 128 * 2},
                    ByHand{"mistral_7b_v0_1", 32 * 4096., 2 * 8 * 128 * 2},
                    ByHand{"mistral_7b_v0_3", 32 * 8192., 2 * 8 * 128 * 2},
                    ByHand{"gpt_oss_20b", 12 * 8192. + 12 * 128., 2 * 8 * 64 * 2}),
    [](const auto& hand) { return std::string(hand.param.model); });

TEST(Plan, GivenWeightBytesAreTheWholeOfOtherBytes) {
  const Fields plan =
      PlanJson("llama_3_1_8b", {"--batch=32", "--tokens=8192", "--weight_bytes=16000000000"});
  const double kv_bytes = 34359738368;
  const double share = kv_bytes / (kv_bytes + 16e9);
  const double r = 132.0 / 256.0;  // (128 + 4) / (2 * 128)
  EXPECT_EQ(plan.at("other_bytes").number_value(), 16e9);
  EXPECT_DOUBLE_EQ(plan.at("cache_share").number_value(), share);
  EXPECT_DOUBLE_EQ(plan.at("r").number_value(), r);
  EXPECT_EQ(plan.at("r_source").string_value(), "bytes");
  EXPECT_DOUBLE_EQ(plan.at("predicted_speedup").number_value(), 1 / (1 - share * (1 - r)));
}

TEST(Plan, IsBf16WithoutTheOptInAndStillShowsWhatFp8WouldGive) {
  const Fields plan = PlanJson("llama_3_1_8b", {"--batch=32", "--tokens=8192"});
  EXPECT_EQ(plan.at("precision").string_value(), "bf16");
  EXPECT_GT(plan.at("predicted_speedup").number_value(), 1.4);
  EXPECT_THAT(plan.at("reason").string_value(), HasSubstr("allow_fp8_kv"));
}

TEST(Plan, IsFp8WhereTheCacheIsALargeShare) {
  const Fields plan = PlanJson("llama_3_1_8b", {"--batch=32", "--tokens=8192", "--allow_fp8_kv"});
  EXPECT_EQ(plan.at("precision").string_value(), "fp8_kv");
}

TEST(Plan, IsBf16WhereTheWeightsAreAlmostAllThatAStepReads) {
  const Fields plan = PlanJson("llama_3_1_8b", {"--batch=1", "--tokens=1024", "--allow_fp8_kv"});
  EXPECT_EQ(plan.at("precision").string_value(), "bf16");
}

TEST(Plan, TakesAMeasuredRatioOverThatOfTheBytes) {
  const Fields plan = PlanJson("llama_3_1_8b", {"--ratio=0.7", "--batch=32", "--tokens=8192"});
  EXPECT_EQ(plan.at("r").number_value(), 0.7);
  EXPECT_EQ(plan.at("r_source").string_value(), "measured");
}

TEST(Plan, DrawsAMapWithTheLengthFromWhichFp8Pays) {
  const Ran ran = Plan("llama_3_1_8b", {"--allow_fp8_kv", "--gpu_gb=80", "--rpc_us=20"});
  EXPECT_EQ(ran.exit_code, kExitOk);
  EXPECT_THAT(ran.out, HasSubstr("batch \\ tokens"));
  EXPECT_THAT(ran.out, HasSubstr("fp8_kv from"));
  EXPECT_THAT(ran.out, HasSubstr("with a call of 20 us a layer"));
  EXPECT_THAT(ran.out, HasSubstr("sequences beside the weights in 80 GB"));
}

TEST(Plan, RefusesWhatItCannotReadOrRepresent) {
  EXPECT_EQ(Plan("no_such_model", {}).exit_code, kExitFailed);
  EXPECT_EQ(Plan("llama_3_1_8b", {"--batch=0"}).exit_code, kExitUsage);
  EXPECT_EQ(Plan("llama_3_1_8b", {"--weight_bytes=-1"}).exit_code, kExitUsage);
  EXPECT_EQ(Plan("llama_3_1_8b", {"--ratio=nan"}).exit_code, kExitUsage);
  EXPECT_EQ(RunCommandLine({"plan"}, std::cout, std::cerr), kExitUsage);
}

}  // namespace
}  // namespace fp8kvd::ctl
