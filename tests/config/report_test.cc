#include "config/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fp8kvd::config {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// Four layers, two of them with a window of 64: groups of 2 layers x 1 KV head x 64 elements.
constexpr const char* kModel =
    "policy { allow_fp8_kv: true }"
    "models { name: \"m\" layers: 4 q_heads: 2 kv_heads: 1 head_dim: 64 window: 64"
    "         layer_rules { layers: \"1-3/2\" window: 0 } bf16_layers: \"3\""
    "         expected_seqs: 3 expected_tokens: 1000 other_bytes: 1536000 }";

Loaded Good(const std::string& text, const std::string& folder = "") {
  auto loaded = LoadText(text, Format::kTextproto, "file", folder, CommandLine(), {});
  EXPECT_TRUE(loaded.ok()) << loaded.status();
  return loaded.ok() ? *std::move(loaded) : Loaded{};
}

std::string Report(const Loaded& loaded, int64_t bytes_free = 0) {
  const auto report = CheckReport(loaded, bytes_free, PlainBlockBytes);
  EXPECT_TRUE(report.ok()) << report.status();
  return report.value_or("");
}

// By hand: K and V of a token and layer are 256 bytes in bf16, 136 in fp8_kv; a page of two layers
// is 64 x 2 x 136 = 17,408 bytes. Windowed: 2 x (64 + 128) tokens, 6 pages and 1; full: 16 pages.
TEST(Report, TellsShapeDecisionAndPools) {
  const Loaded loaded = Good(kModel);
  const auto pools = PlanPools({loaded.models[0].geometry}, loaded.options.models, CacheOptions(),
                               0, PlainBlockBytes);
  ASSERT_TRUE(pools.ok()) << pools.status();
  EXPECT_THAT(
      ModelLines(loaded.models[0], (*pools)[0]),
      ElementsAre("model \"m\": 4 layers, 2 q_heads, 1 kv_heads, head_dim 64, sm_scale 0.125",
                  // 3 x (2 x 64 + 2 x 1000) x 256 = 1,634,304 bytes, 866,304 without layer 3.
                  HasSubstr("fp8_kv because the cache's share reaches cache_share_min and r < 1: "
                            "batch 3 x 1000 tokens read 1.634e+06 bytes of K and V (8.663e+05 "
                            "without bf16_layers) and 1.536e+06 others, cache_share 0.5155"),
                  "  group 0: layers 0,2, window 64, fp8_kv: 21 pages of 17408 bytes (0.3 MiB), at "
                  "most 7 per sequence",
                  "  group 1: layers 1, all tokens, fp8_kv: 48 pages of 8704 bytes (0.4 MiB), at "
                  "most 16 per sequence",
                  "  group 2: layers 3, all tokens, bf16: 48 pages of 16384 bytes (0.8 MiB), at "
                  "most 16 per sequence"));
}

TEST(Report, AddsThePoolsUp) {
  // 21 x 17,408 + 48 x 8,704 + 48 x 16,384.
  EXPECT_THAT(Report(Good(kModel)), HasSubstr("# pools: 1569792 bytes (1.5 MiB)\n"));
}

TEST(Report, AFractionNeedsADeviceAndSaysSoWithoutOne) {
  const Loaded loaded = Good(std::string("cache { pool_fraction: 0.5 }") + kModel);
  EXPECT_THAT(Report(loaded), HasSubstr("1569792 bytes (1.5 MiB), before pool_fraction scales"));
  EXPECT_THAT(Report(loaded, /*bytes_free=*/4 * 1569792), HasSubstr("# pools: 3139584 bytes"));
  EXPECT_EQ(CheckReport(loaded, /*bytes_free=*/1000, PlainBlockBytes).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(Report, SaysWhereAValueIsFromIfItIsNoDefault) {
  const auto loaded =
      LoadText(std::string("server { poller_threads: 3 }") + kModel, Format::kTextproto, "file", "",
               CommandLine(), {"FP8KVD_STREAMS_MAX=7", "FP8KVD_PORT=1"});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const std::string report = Report(*loaded);
  EXPECT_THAT(report, HasSubstr("  poller_threads: 3  # file\n"));
  EXPECT_THAT(report, HasSubstr("  streams_max: 7  # FP8KVD_STREAMS_MAX\n"));
  EXPECT_THAT(report, HasSubstr("  keepalive_ms: 20000\n"));
  EXPECT_THAT(report, HasSubstr("# warning: environment: FP8KVD_PORT is no key of ours"));
}

TEST(Report, WritesAnImportedShapeOutAndNamesItsFile) {
  const std::string report =
      Report(Good("models { name: \"g\" hf_config: \"hf/gemma_3_270m.json\" }", "tests/data"));
  EXPECT_THAT(report, HasSubstr("  # shape from hf/gemma_3_270m.json\n"));
  EXPECT_THAT(report, HasSubstr("  layer_rules {\n    layers: \"5-17/6\"\n    window: 0\n  }\n"));
  EXPECT_THAT(report, Not(HasSubstr("hf_config:")));
}

}  // namespace
}  // namespace fp8kvd::config
