// fp8kvctl plan on real config.json files, against bytes worked by hand from their shapes.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <iostream>
#include <sstream>
#include <tuple>

#include "gmock/gmock.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"
#include "gtest/gtest.h"

#include "client/cc/ctl/commands.h"
#include "config/calibration.h"

namespace fp8kvd::ctl {
namespace {

using testing::HasSubstr;
using testing::Not;
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
  double head_dim;
  double weight_bytes;  // on a device: layers x (attention + MLP) + embedding + head, 2 B each
};

double Dense(double layers, double hidden, double q_heads, double kv_heads, double head_dim,
             double intermediate, double vocabularies) {
  const double attention = hidden * (2 * q_heads + 2 * kv_heads) * head_dim;
  return 2 * (layers * (attention + 3 * hidden * intermediate) + hidden * vocabularies);
}

// Experts in MXFP4, 4 bits and a byte for 32 of them: 17/32 bytes. Attention, router, embedding and
// head in bf16.
constexpr double kGptOssBytes =
    24 * 32 * 3 * 2880. * 2880 * 17 / 32 +
    2 * (24 * (2880. * (2 * 64 + 2 * 8) * 64 + 2880. * 32) + 2 * 201088. * 2880);

class Models : public testing::TestWithParam<ByHand> {};

TEST_P(Models, HaveTheCacheBytesOfTheirShape) {
  const Fields plan = PlanJson(GetParam().model, {"--batch=32", "--tokens=8192"});
  EXPECT_EQ(plan.at("kv_bytes").number_value(),
            32 * GetParam().tokens_x_layers * GetParam().row_bytes);
}

TEST_P(Models, HaveTheWeightsOfTheirShapeAndFollowTheFormula) {
  const ByHand& hand = GetParam();
  const Fields plan = PlanJson(hand.model, {"--batch=32", "--tokens=8192", "--allow_fp8_kv"});
  if (hand.weight_bytes > 0) {
    EXPECT_NEAR(plan.at("weight_bytes").number_value(), hand.weight_bytes,
                1e-4 * hand.weight_bytes);
  }
  const double kv_bytes = 32 * hand.tokens_x_layers * hand.row_bytes;
  const double other_bytes = plan.at("other_bytes").number_value();
  const double share = kv_bytes / (kv_bytes + other_bytes);
  const double r = (hand.head_dim + 4) / (2 * hand.head_dim);
  EXPECT_DOUBLE_EQ(plan.at("cache_share").number_value(), share);
  EXPECT_DOUBLE_EQ(plan.at("r").number_value(), r);
  EXPECT_DOUBLE_EQ(plan.at("predicted_speedup").number_value(), 1 / (1 - share * (1 - r)));
  EXPECT_EQ(plan.at("precision").string_value(), share >= 0.2 ? "fp8_kv" : "bf16");
  if (hand.weight_bytes > 0 && hand.weight_bytes < 141e9) {  // an H200's memory
    EXPECT_EQ(plan.at("seqs_fit_bf16").number_value(),
              std::floor((141e9 - plan.at("weight_bytes").number_value()) / (kv_bytes / 32)));
    EXPECT_EQ(plan.at("seqs_fit_fp8_kv").number_value(),
              std::floor((141e9 - plan.at("weight_bytes").number_value()) / (kv_bytes / 32 * r)));
  }
}

// Weights: hidden x (q_heads + 2 kv_heads) x head_dim and q_heads x head_dim x hidden, 3 x hidden x
// intermediate, hidden x vocabulary once where the head is tied to the embedding, else twice.
INSTANTIATE_TEST_SUITE_P(Plan, Models,
                         testing::Values(ByHand{"llama_3_1_8b", 32 * 8192., 2 * 8 * 128 * 2, 128,
                                                Dense(32, 4096, 32, 8, 128, 14336, 2 * 128256.)},
                                         ByHand{"llama_3_1_70b", 80 * 8192., 2 * 8 * 128 * 2, 128,
                                                Dense(80, 8192, 64, 8, 128, 28672, 2 * 128256.)},
                                         ByHand{"qwen2_5_7b", 28 * 8192., 2 * 4 * 128 * 2, 128,
                                                Dense(28, 3584, 28, 4, 128, 18944, 2 * 152064.)},
                                         ByHand{"gemma_3_27b", 10 * 8192. + 52 * 1024.,
                                                2 * 16 * 128 * 2, 128,
                                                Dense(62, 5376, 32, 16, 128, 21504, 262208.)},
                                         ByHand{"mistral_7b_v0_1", 32 * 4096., 2 * 8 * 128 * 2, 128,
                                                Dense(32, 4096, 32, 8, 128, 14336, 2 * 32000.)},
                                         ByHand{"mistral_7b_v0_3", 32 * 8192., 2 * 8 * 128 * 2, 128,
                                                Dense(32, 4096, 32, 8, 128, 14336, 2 * 32768.)},
                                         ByHand{"gpt_oss_20b", 12 * 8192. + 12 * 128.,
                                                2 * 8 * 64 * 2, 64, kGptOssBytes}),
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

TEST(Plan, TakesAGivenRatioOverThatOfTheBytes) {
  const Fields plan = PlanJson("llama_3_1_8b", {"--ratio=0.7", "--batch=32", "--tokens=8192"});
  EXPECT_EQ(plan.at("r").number_value(), 0.7);
  EXPECT_EQ(plan.at("r_source").string_value(), "given");
}

TEST(Plan, DrawsAMapWithTheLengthFromWhichFp8Pays) {
  const Ran ran = Plan("llama_3_1_8b", {"--allow_fp8_kv", "--gpu_gb=80", "--rpc_us=20"});
  EXPECT_EQ(ran.exit_code, kExitOk);
  EXPECT_THAT(ran.out, HasSubstr("batch \\ tokens"));
  EXPECT_THAT(ran.out, HasSubstr("fp8_kv from"));
  EXPECT_THAT(ran.out, HasSubstr("with a call of 20 us a layer"));
  EXPECT_THAT(ran.out, HasSubstr("sequences beside the weights in 80 GB (given)"));
}

TEST(Plan, MemoryAndBandwidthAreOfOneDevice) {
  const auto device = [](std::vector<std::string> flags) {
    flags.emplace_back("--rpc_us=20");
    const Fields plan = PlanJson("llama_3_1_8b", flags);
    return std::tuple(plan.at("gpu").string_value(), plan.at("gpu_gb").number_value(),
                      plan.at("read_gb_s").number_value());
  };
  EXPECT_EQ(device({}), std::tuple("h200", 141, 4800));
  EXPECT_EQ(device({"--gpu=h100"}), std::tuple("h100", 80, 3350));
  EXPECT_EQ(device({"--gpu=h100", "--read_gb_s=3000"}), std::tuple("h100", 80, 3000));
  EXPECT_EQ(device({"--gpu_gb=24", "--read_gb_s=500"}), std::tuple("given", 24, 500));
  // Of a calibrated device what was measured, unless another is named.
  const std::string path = "--calibration=docs/measurements/calibration_h200.json";
  const auto [gpu, gpu_gb, read_gb_s] = device({path});
  EXPECT_EQ(gpu, "h200");
  EXPECT_EQ(gpu_gb, 141);
  EXPECT_GT(read_gb_s, 4000);
  EXPECT_LT(read_gb_s, 4800);
  EXPECT_EQ(device({path, "--gpu=l40s"}), std::tuple("l40s", 48, 864));
  const Ran unknown = Plan("llama_3_1_8b", {"--gpu=h1000"});
  EXPECT_EQ(unknown.exit_code, kExitUsage);
  EXPECT_THAT(unknown.err, HasSubstr("known are a10, a100_40"));
}

// 32 layers of 8,192 tokens at a batch of 8: 8.6 GB beside 16 GB, a share of 0.35. Predicted are
// 1.20x; of 5.1 ms a step 32 calls of 1 ms leave little.
TEST(Plan, TheVerdictSaysWhatTheCallsLeave) {
  const auto reason = [](const char* rpc_us) {
    return PlanJson("llama_3_1_8b", {"--batch=8", "--tokens=8192", "--allow_fp8_kv",
                                     "--weight_bytes=16000000000", rpc_us})
        .at("reason")
        .string_value();
  };
  EXPECT_THAT(reason("--rpc_us=20"), Not(HasSubstr("though")));
  EXPECT_THAT(reason("--rpc_us=20"), HasSubstr("step with a call of 20 us a layer"));
  EXPECT_THAT(reason("--rpc_us=1000"), testing::StartsWith("fp8_kv because the cache's share"));
  EXPECT_THAT(reason("--rpc_us=1000"),
              HasSubstr("though with the calls' own cost the step gains 1.024x only"));
}

// Of 8,192 tokens 59 sequences fit beside the weights in bf16, 115 in fp8_kv.
TEST(Plan, SaysWhereNotAllThatWereAskedForFit) {
  const auto plan = [](const char* batch) {
    return Plan("llama_3_1_8b", {"--allow_fp8_kv", "--tokens=8192", "--gpu=h100", batch}).out;
  };
  EXPECT_THAT(plan("--batch=59"), HasSubstr("59 bf16, 115 fp8_kv\n"));
  EXPECT_THAT(plan("--batch=60"), HasSubstr("59 bf16, 115 fp8_kv (your 60 fit only in fp8_kv)"));
  EXPECT_THAT(plan("--batch=116"), HasSubstr("59 bf16, 115 fp8_kv (your 116 fit in neither)"));
}

// Llama 3.1 8B at a batch of 32 beside 16 GB: 32 x 131,072 B a token reach a fifth of all from
// 0.25 x 16e9 / 4,194,304 = 953.7 tokens on.
TEST(Plan, TheCrossoverIsWhereTheShareReachesTheLeast) {
  const Fields plan = PlanJson("llama_3_1_8b", {"--batch=32", "--weight_bytes=16000000000"});
  EXPECT_EQ(plan.at("fp8_kv_from_tokens").number_value(), 954);
}

TEST(Plan, LayersThatStayBf16WinNothing) {
  const Fields plan = PlanJson("llama_3_1_8b", {"--batch=32", "--tokens=8192", "--allow_fp8_kv",
                                                "--weight_bytes=0", "--bf16_layers=0-15"});
  EXPECT_EQ(plan.at("kv_bytes").number_value(), 34359738368);
  // Half of the bytes at r = 132 / 256.
  EXPECT_DOUBLE_EQ(plan.at("attention_speedup").number_value(), 1 / (1 - 0.5 * (1 - 132.0 / 256)));
}

TEST(Plan, ACalibrationGivesTheRatioAtItsContext) {
  const std::string path = testing::TempDir() + "/plan_calibration.json";
  config::Calibration calibration;
  calibration.version = "1";
  calibration.device_name = "d";
  calibration.read_bytes_per_s = 4e12;
  calibration.call_us = 50;
  calibration.points = {{128, 4, 8, 1, 64, 10, 11}, {128, 4, 8, 32, 8192, 100, 60}};
  std::ofstream(path) << config::FormatCalibration(calibration);
  const Fields large = PlanJson("llama_3_1_8b", {"--batch=32", "--tokens=8192", "--allow_fp8_kv",
                                                 "--ratio=0.9", "--calibration=" + path});
  EXPECT_DOUBLE_EQ(large.at("r").number_value(), 0.6);
  EXPECT_EQ(large.at("r_source").string_value(), "measured");
  EXPECT_GT(large.at("speedup_with_calls").number_value(), 1);
  const Fields small = PlanJson("llama_3_1_8b", {"--batch=1", "--tokens=64", "--allow_fp8_kv",
                                                 "--weight_bytes=0", "--calibration=" + path});
  EXPECT_DOUBLE_EQ(small.at("r").number_value(), 1.1);
  EXPECT_EQ(small.at("precision").string_value(), "bf16");
}

TEST(Plan, DrawsTheMapAsSvg) {
  const std::string path = testing::TempDir() + "/plan_map.svg";
  ASSERT_EQ(Plan("llama_3_1_8b", {"--allow_fp8_kv", "--svg=" + path}).exit_code, kExitOk);
  std::ifstream file(path);
  const std::string svg(std::istreambuf_iterator<char>(file), {});
  EXPECT_THAT(svg, testing::StartsWith("<svg "));
  EXPECT_THAT(svg, testing::EndsWith("</svg>\n"));
  EXPECT_THAT(svg, HasSubstr("<polyline"));  // the crossover
  EXPECT_EQ(Plan("llama_3_1_8b", {"--svg=/no/such/folder/map.svg"}).exit_code, kExitUnreachable);
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
