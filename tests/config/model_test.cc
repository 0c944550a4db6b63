#include "config/model.h"

#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fp8kvd::config {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Gemma 3 270M: every sixth layer sees all tokens, the others the latest 512.
ModelOptions Gemma() {
  ModelOptions options;
  options.name = "gemma";
  options.layers = 18;
  options.q_heads = 4;
  options.kv_heads = 1;
  options.head_dim = 256;
  options.sm_scale = 0.0625F;
  options.window = 512;
  options.layer_rules = {{.layers = "5-17/6", .window = 0, .softcap = {}, .has_sinks = {}}};
  options.expected_seqs = 2;
  options.expected_tokens = 4096;
  return options;
}

ModelGeometry Made(const ModelOptions& options, Precision precision = Precision::kBf16) {
  const auto geometry = MakeGeometry(options, precision);
  EXPECT_TRUE(geometry.ok()) << geometry.status();
  return geometry.value_or(ModelGeometry{});
}

std::string Refusal(const ModelOptions& options) {
  const auto geometry = MakeGeometry(options, Precision::kBf16);
  EXPECT_EQ(geometry.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(geometry.status().message());
}

TEST(MakeGeometry, GroupsLayersByWindowInTheOrderOfTheirFirstLayers) {
  const ModelGeometry geometry = Made(Gemma());
  ASSERT_EQ(geometry.groups.size(), 2u);
  EXPECT_EQ(geometry.groups[0].window, 512);
  EXPECT_EQ(geometry.groups[0].layers.size(), 15u);
  EXPECT_EQ(geometry.groups[1].window, 0);
  EXPECT_THAT(geometry.groups[1].layers, ElementsAre(5, 11, 17));
}

TEST(MakeGeometry, EveryLayerKnowsItsPlaceInItsGroup) {
  const ModelGeometry geometry = Made(Gemma());
  ASSERT_EQ(geometry.layer.size(), 18u);
  for (int32_t layer = 0; layer < geometry.layers; ++layer) {
    const LayerGeometry& placed = geometry.layer[layer];
    EXPECT_EQ(geometry.groups[placed.group].layers[placed.group_layer], layer);
    EXPECT_EQ(geometry.groups[placed.group].window, placed.window);
  }
}

TEST(MakeGeometry, SensitiveLayersStayBf16InAGroupOfTheirOwn) {
  ModelOptions options = Gemma();
  options.bf16_layers = "0,11";
  const ModelGeometry geometry = Made(options, Precision::kFp8Kv);
  ASSERT_EQ(geometry.groups.size(), 4u);
  EXPECT_THAT(geometry.groups[0].layers, ElementsAre(0));
  EXPECT_EQ(geometry.groups[0].precision, Precision::kBf16);
  EXPECT_EQ(geometry.groups[1].precision, Precision::kFp8Kv);
  EXPECT_THAT(geometry.groups[2].layers, ElementsAre(5, 17));
  EXPECT_THAT(geometry.groups[3].layers, ElementsAre(11));
}

TEST(MakeGeometry, ALaterRuleWinsAndLeavesWhatItDoesNotName) {
  ModelOptions options = Gemma();
  options.layer_rules = {{.layers = "0-3", .window = 64, .softcap = 30.0F, .has_sinks = true},
                         {.layers = "2", .window = 128, .softcap = {}, .has_sinks = {}}};
  const ModelGeometry geometry = Made(options);
  EXPECT_EQ(geometry.layer[1].window, 64);
  EXPECT_EQ(geometry.layer[2].window, 128);
  EXPECT_EQ(geometry.layer[2].softcap, 30.0F);
  EXPECT_TRUE(geometry.layer[2].has_sinks);
  EXPECT_EQ(geometry.layer[4].window, 512);
  EXPECT_EQ(geometry.layer[4].softcap, 0.0F);
  EXPECT_FALSE(geometry.layer[4].has_sinks);
}

TEST(MakeGeometry, SmScaleDefaultsToOneOverTheRootOfHeadDim) {
  ModelOptions options = Gemma();
  options.sm_scale = 0;
  options.head_dim = 64;
  EXPECT_EQ(Made(options).sm_scale, 0.125F);
}

TEST(MakeGeometry, EveryGroupSizeFromOneToSixteenIsServed) {
  for (int32_t group = 1; group <= kGroupMax; ++group) {
    ModelOptions options = Gemma();
    options.kv_heads = 3;
    options.q_heads = 3 * group;
    EXPECT_EQ(Made(options).group_size(), group);
  }
}

TEST(MakeGeometry, ARefusalSaysWhatIsAskedAndWhatIsAllowed) {
  ModelOptions options = Gemma();
  options.head_dim = 72;
  EXPECT_THAT(Refusal(options), HasSubstr("head_dim 72 has no kernel; kernels exist for 64, 80"));
  options = Gemma();
  options.kv_heads = 3;
  EXPECT_THAT(Refusal(options), HasSubstr("q_heads 4 is no multiple of kv_heads 3"));
  options = Gemma();
  options.q_heads = 17;
  EXPECT_THAT(Refusal(options), HasSubstr("q_heads / kv_heads is 17, kernels exist for 1 to 16"));
  options = Gemma();
  options.layers = 0;
  EXPECT_THAT(Refusal(options), HasSubstr("layers is 0, allowed is 1 to 512"));
  options = Gemma();
  options.expected_tokens = INT32_MAX;
  EXPECT_THAT(Refusal(options), HasSubstr("expected_tokens is 2147483647"));
  options = Gemma();
  options.layer_rules[0].layers = "18";
  EXPECT_THAT(Refusal(options), HasSubstr("layer_rules: layer list names layer 18"));
  options = Gemma();
  options.bf16_layers = "x";
  EXPECT_THAT(Refusal(options), HasSubstr("bf16_layers: layer list \"x\""));
}

TEST(MakeGeometry, RefusesNumbersThatNoKernelCanUse) {
  for (const float bad :
       {-1.0F, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    ModelOptions options = Gemma();
    options.sm_scale = bad;
    EXPECT_THAT(Refusal(options), HasSubstr("sm_scale is"));
    options = Gemma();
    options.layer_rules[0].softcap = bad;
    EXPECT_THAT(Refusal(options), HasSubstr("softcap is"));
  }
  ModelOptions options = Gemma();
  options.layer_rules[0].window = -1;
  EXPECT_THAT(Refusal(options), HasSubstr("window is -1"));
}

TEST(MakeGeometry, ARefusalEscapesTheNameOfTheModel) {
  ModelOptions options = Gemma();
  options.name = "a\nb";
  options.layers = 0;
  EXPECT_THAT(Refusal(options), HasSubstr("model \"a\\nb\""));
}

std::vector<ModelPools> Pools(const ModelOptions& model, const CacheOptions& cache,
                              int64_t bytes_free = 0) {
  const std::vector<ModelGeometry> geometries = {Made(model)};
  const auto pools = PlanPools(geometries, {model}, cache, bytes_free, PlainBlockBytes);
  EXPECT_TRUE(pools.ok()) << pools.status();
  return pools.value_or(std::vector<ModelPools>(1));
}

// By hand: all tokens take 4096 / 64 = 64 pages; a window of 512 with a slack of 128 holds at most
// 2 * 640 = 1280 tokens, 20 pages, and one more where pages are cut.
TEST(PlanPools, HoldsTheExpectedSequencesAndNoMore) {
  const std::vector<ModelPools> pools = Pools(Gemma(), CacheOptions());
  ASSERT_EQ(pools[0].groups.size(), 2u);
  EXPECT_EQ(pools[0].groups[0].pages_per_seq, 21);
  EXPECT_EQ(pools[0].groups[0].pages, 42);
  EXPECT_EQ(pools[0].groups[0].page_bytes, 15 * 64 * 4 * 256);
  EXPECT_EQ(pools[0].groups[1].pages_per_seq, 64);
  EXPECT_EQ(pools[0].groups[1].pages, 128);
  EXPECT_EQ(pools[0].groups[1].page_bytes, 3 * 64 * 4 * 256);
}

TEST(PlanPools, Fp8KvPagesTakeTheCodesAndTwoScalesPerToken) {
  const std::vector<ModelGeometry> geometries = {Made(Gemma(), Precision::kFp8Kv)};
  const auto pools = PlanPools(geometries, {Gemma()}, CacheOptions(), 0, PlainBlockBytes);
  ASSERT_TRUE(pools.ok());
  EXPECT_EQ((*pools)[0].groups[1].page_bytes, 3 * 64 * (2 * 256 + 8));
}

TEST(PlanPools, AByteBudgetScalesEveryPoolAndIsNotExceeded) {
  CacheOptions cache;
  cache.pool_bytes = int64_t{100} << 20;
  const std::vector<ModelPools> pools = Pools(Gemma(), cache);
  // Needed: 42 x 983,040 + 128 x 196,608 = 66,453,504 bytes.
  EXPECT_EQ(pools[0].groups[0].pages, 42 * cache.pool_bytes / 66453504);
  EXPECT_EQ(pools[0].groups[1].pages, 128 * cache.pool_bytes / 66453504);
  EXPECT_LE(pools[0].groups[0].pages * pools[0].groups[0].page_bytes +
                pools[0].groups[1].pages * pools[0].groups[1].page_bytes,
            cache.pool_bytes);
}

TEST(PlanPools, AFractionIsOfTheFreeBytesOfTheDevice) {
  CacheOptions cache;
  cache.pool_fraction = 0.5;
  const std::vector<ModelPools> pools = Pools(Gemma(), cache, /*bytes_free=*/2 * 66453504);
  EXPECT_EQ(pools[0].groups[0].pages, 42);
  EXPECT_EQ(pools[0].groups[1].pages, 128);
}

TEST(PlanPools, EveryModelGetsItsPartOfTheBudget) {
  ModelOptions small = Gemma();
  small.name = "small";
  small.expected_tokens = 64;  // 2 pages in each group
  const std::vector<ModelGeometry> geometries = {Made(Gemma()), Made(small)};
  CacheOptions cache;
  cache.pool_bytes = 2 * (66'453'504 + 2 * (983'040 + 196'608));
  const auto pools = PlanPools(geometries, {Gemma(), small}, cache, 0, PlainBlockBytes);
  ASSERT_TRUE(pools.ok()) << pools.status();
  EXPECT_EQ((*pools)[0].groups[1].pages, 2 * 128);
  EXPECT_EQ((*pools)[1].groups[0].pages, 2 * 2);
  EXPECT_EQ((*pools)[1].groups[1].pages, 2 * 2);
}

TEST(PlanPools, TheModelWhosePartIsTooSmallIsNamed) {
  ModelOptions large = Gemma();
  large.expected_seqs = 1000;
  ModelOptions small = Gemma();
  small.name = "small";
  small.expected_seqs = 1;
  const std::vector<ModelGeometry> geometries = {Made(large), Made(small)};
  CacheOptions cache;
  cache.pool_bytes = int64_t{1} << 30;
  const auto pools = PlanPools(geometries, {large, small}, cache, 0, PlainBlockBytes);
  EXPECT_THAT(std::string(pools.status().message()), HasSubstr("model \"small\": its pool gets"));
}

std::string PoolRefusal(const ModelOptions& model, const CacheOptions& cache, int64_t bytes_free) {
  const std::vector<ModelGeometry> geometries = {Made(model)};
  const auto pools = PlanPools(geometries, {model}, cache, bytes_free, PlainBlockBytes);
  EXPECT_EQ(pools.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(pools.status().message());
}

TEST(PlanPools, ABudgetTooSmallForOneSequenceIsRefused) {
  CacheOptions cache;
  cache.pool_bytes = 20 << 20;
  EXPECT_THAT(PoolRefusal(Gemma(), cache, 0),
              HasSubstr("one sequence of expected_tokens needs 21"));
  cache.pool_bytes = 0;
  cache.pool_fraction = 0.9;
  EXPECT_THAT(PoolRefusal(Gemma(), cache, /*bytes_free=*/0), HasSubstr("raise pool_bytes"));
}

TEST(PlanPools, TheLargestWorkloadIsRefusedWithoutOverflow) {
  ModelOptions model = Gemma();
  model.layers = kLayersMax;
  model.q_heads = model.kv_heads = kKvHeadsMax;
  model.expected_seqs = kSeqsMax;
  model.expected_tokens = kSeqLenMax;
  EXPECT_THAT(PoolRefusal(model, CacheOptions(), 0), HasSubstr("pages in one pool, allowed is"));
  CacheOptions cache;
  cache.pool_bytes = INT64_MAX;
  EXPECT_THAT(PoolRefusal(model, cache, 0), HasSubstr("need more than 1125899906842624 bytes"));
}

}  // namespace
}  // namespace fp8kvd::config
