// fp8kvctl accuracy over the captures of the tree: the contract of the numerics on real attention.
#include "client/cc/ctl/accuracy.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "client/cc/ctl/commands.h"

namespace fp8kvd::ctl {
namespace {

using kernels::reference::Way;
using testing::HasSubstr;
using testing::Not;

class Captures : public testing::TestWithParam<const char*> {
 protected:
  // Once for all tests of a capture: it is a second of arithmetic.
  static LayerAccuracy Measured() {
    static std::map<std::string, LayerAccuracy> measured;
    const auto [at, is_new] = measured.try_emplace(GetParam());
    if (is_new) {
      auto layer = MeasureCapture(std::string("tests/data/captures/") + GetParam(), "");
      EXPECT_TRUE(layer.ok()) << layer.status();
      at->second = std::move(layer).value_or(LayerAccuracy{});
    }
    return at->second;
  }
};

TEST_P(Captures, TheKernelKeepsItsBoundsAndBrokenScalesDoNot) {
  const LayerAccuracy layer = Measured();
  const KernelCheck kernel = layer.kernel.value_or(KernelCheck{});
  EXPECT_GE(kernel.pairs, 64);
  EXPECT_LE(kernel.rel_l2_fp32, 2e-3);
  EXPECT_LE(kernel.rel_l2_bf16, 3e-3);
  EXPECT_LE(kernel.worst_element, 1);
  EXPECT_TRUE(kernel.held) << kernel.why;
  // A V scale that is off by a twentieth costs just that; one token's scale for all costs the
  // output.
  EXPECT_NEAR(kernel.control_v_scale, 0.05, 1e-6);
  EXPECT_GT(kernel.control_one_scale, 0.5);
  EXPECT_LT(kernel.control_one_scale, 1.7);
  EXPECT_TRUE(kernel.controls_refused);
}

TEST_P(Captures, TheFormatsErrorIsTheKnownOneAndNearLossless) {
  const LayerAccuracy layer = Measured();
  ASSERT_TRUE(layer.expected_op.has_value());
  EXPECT_NEAR(layer.op() / *layer.expected_op, 1, 0.02);
  EXPECT_TRUE(layer.near_lossless());
  EXPECT_GT(layer.accuracy.of(Way::kRowKOnly).op, 2 * layer.accuracy.of(Way::kRowVOnly).op);
  EXPECT_TRUE(layer.held());
}

INSTANTIATE_TEST_SUITE_P(
    Accuracy, Captures,
    testing::Values("gemma3_text_a_layer05.safetensors", "gemma3_text_a_layer10.safetensors",
                    "smollm2_text_a_layer16.safetensors"),
    [](const auto& name) {
      return std::string(name.param).substr(0, std::string(name.param).find('.'));
    });

// The captures are three of 48 layers; what was measured on all when they were made.
TEST(Accuracy, EveryLayerOfTheCapturedModelsIsNearLossless) {
  for (const auto& [model, layers] : {std::pair("gemma3", 18), std::pair("smollm2", 30)}) {
    const std::string path = std::string("tests/data/captures/") + model + "_text_a_errors.json";
    for (int layer = 0; layer < layers; ++layer) {
      const auto error = ReadExpectedError(path, layer);
      ASSERT_TRUE(error.ok()) << error.status();
      EXPECT_GT(*error, 0.02) << model << " layer " << layer;
      EXPECT_LE(*error, kNearLosslessMax) << model << " layer " << layer;
    }
  }
}

struct Ran {
  int exit_code = 0;
  std::string out;
  std::string err;
};

Ran Accuracy(std::vector<std::string> words) {
  words.insert(words.begin(),
               {"accuracy", "tests/data/captures/gemma3_text_a_layer05.safetensors"});
  std::ostringstream out;
  std::ostringstream err;
  const int exit_code = RunCommandLine(words, out, err);
  return {exit_code, out.str(), err.str()};
}

TEST(AccuracyCommand, WritesAReportThatNeedsNothingFromElsewhere) {
  const std::string path = testing::TempDir() + "/accuracy.html";
  const Ran ran = Accuracy({"--html=" + path});
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.err;
  EXPECT_THAT(ran.out, HasSubstr("fp8_kv is near-lossless on 1 of 1 captures"));
  EXPECT_THAT(ran.out, HasSubstr("the kernel's accuracy contract held"));
  std::ifstream file(path);
  const std::string html(std::istreambuf_iterator<char>(file), {});
  EXPECT_THAT(html, testing::StartsWith("<!doctype html>"));
  EXPECT_THAT(html, testing::EndsWith("</html>\n"));
  EXPECT_THAT(html, HasSubstr("Every layer is near-lossless"));
  EXPECT_THAT(html, HasSubstr("prefers-color-scheme:dark"));
  EXPECT_THAT(html, HasSubstr("<svg "));
  for (const char* foreign : {"<script", "src=", "href=", "@import", "url("}) {
    EXPECT_THAT(html, Not(HasSubstr(foreign)));
  }
}

TEST(AccuracyCommand, FailsWhereTheErrorIsNotTheExpectedOne) {
  const std::string path = testing::TempDir() + "/other_errors.json";
  std::ofstream(path) << R"({"per_layer": {"decode": {"5": {"row": {"op": 0.0440}}}}})";  // 0.0461
  const Ran ran = Accuracy({"--errors=" + path});
  EXPECT_EQ(ran.exit_code, kExitFailed);
  EXPECT_THAT(ran.out, HasSubstr("accuracy contract BROKEN"));
  EXPECT_THAT(ran.err, HasSubstr("the error is 0.0461, expected is 0.0440 within 2 %"));
}

TEST(AccuracyCommand, RefusesWhatItCannotRead) {
  std::ostringstream ignored;
  EXPECT_EQ(RunCommandLine({"accuracy"}, ignored, ignored), kExitUsage);
  EXPECT_EQ(RunCommandLine({"accuracy", "/no/such.safetensors"}, ignored, ignored), kExitFailed);
  EXPECT_EQ(Accuracy({"--html=/no/such/folder/report.html"}).exit_code, kExitUnreachable);
}

}  // namespace
}  // namespace fp8kvd::ctl
