#include "config/hf_config.h"

#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/cache_share.h"
#include "config/layer_list.h"
#include "config/load.h"
#include "config/model.h"

namespace fp8kvd::config {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// The lines of a table that are no comment.
std::vector<std::string> Rows(const std::string& path) {
  std::vector<std::string> rows;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.empty() && line[0] != '#') rows.push_back(line);
  }
  return rows;
}

std::string FirstWord(const std::string& row) { return row.substr(0, row.find(' ')); }

std::string NameOf(const ::testing::TestParamInfo<std::string>& info) {
  return FirstWord(info.param);
}

absl::StatusOr<HfModel> ImportFile(const std::string& name) {
  const auto text = ReadFileBounded("tests/data/hf/" + name + ".json", kConfigBytesMax);
  EXPECT_TRUE(text.ok()) << text.status();
  return ImportHfConfig(text.value_or(""));
}

// A Llama of 4 layers with these members more.
std::string Small(absl::string_view members) {
  return absl::StrCat("{\"num_hidden_layers\": 4, \"num_attention_heads\": 32, ",
                      "\"hidden_size\": 4096, \"intermediate_size\": 1, \"vocab_size\": 1, ",
                      members, "}");
}

HfModel Imported(const std::string& text) {
  auto model = ImportHfConfig(text);
  EXPECT_TRUE(model.ok()) << model.status();
  return model.ok() ? *std::move(model) : HfModel{};
}

// --- the shapes of real models

class HfShape : public ::testing::TestWithParam<std::string> {};

TEST_P(HfShape, IsThatOfTheTable) {
  const auto model = ImportFile(FirstWord(GetParam()));
  ASSERT_TRUE(model.ok()) << model.status();
  const auto geometry = MakeGeometry(model->shape, Precision::kBf16);
  ASSERT_TRUE(geometry.ok()) << geometry.status();
  int32_t window = 0;
  std::vector<int32_t> full;
  for (int32_t layer = 0; layer < geometry->layers; ++layer) {
    window = std::max(window, geometry->layer[layer].window);
    if (geometry->layer[layer].window == 0) full.push_back(layer);
  }
  if (window == 0) full.clear();
  const std::vector<std::string> found = {
      FirstWord(GetParam()),
      absl::StrCat(geometry->layers),
      absl::StrCat(geometry->q_heads),
      absl::StrCat(geometry->kv_heads),
      absl::StrCat(geometry->head_dim),
      absl::StrCat(geometry->sm_scale),
      absl::StrCat(window),
      full.empty() ? "-" : FormatLayerList(full),
      absl::StrCat(geometry->layer[0].softcap),
      absl::StrCat(geometry->layer[0].has_sinks ? 1 : 0),
      absl::StrCat(static_cast<int64_t>(model->weights.TotalBytes()))};
  std::vector<std::string> wanted = absl::StrSplit(GetParam(), ' ', absl::SkipEmpty());
  wanted[5] = absl::StrCat(std::stof(wanted[5]));
  EXPECT_EQ(absl::StrJoin(found, " "), absl::StrJoin(wanted, " "));
}

INSTANTIATE_TEST_SUITE_P(Table, HfShape, ::testing::ValuesIn(Rows("tests/data/hf_shapes.txt")),
                         NameOf);

// --- what cannot be represented

class HfRefusal : public ::testing::TestWithParam<std::string> {};

TEST_P(HfRefusal, NamesWhatItIs) {
  const std::vector<std::string> row = absl::StrSplit(GetParam(), " | ");
  ASSERT_EQ(row.size(), 3u);
  const auto model = ImportHfConfig(Small(row[1]));
  ASSERT_EQ(model.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(model.status().message()), HasSubstr(row[2]));
}

INSTANTIATE_TEST_SUITE_P(Table, HfRefusal, ::testing::ValuesIn(Rows("tests/data/hf_refusals.txt")),
                         NameOf);

TEST(HfConfig, KeysThatAreOffRefuseNothing) {
  const HfModel model =
      Imported(Small(R"("model_type": "llama", "attention_chunk_size": null, "alibi": false,
               "num_kv_shared_layers": 0, "cross_attention_layers": [],
               "is_encoder_decoder": false, "position_embedding_type": "rope")"));
  EXPECT_EQ(model.shape.layers, 4);
}

TEST(HfConfig, WhatIsNoConfigIsRefusedWithItsLine) {
  const auto refusal = [](absl::string_view text) {
    return std::string(ImportHfConfig(text).status().message());
  };
  EXPECT_THAT(refusal("{\n\"a\": }"), StartsWith("line 2: expected a value"));
  EXPECT_THAT(refusal("[]"), StartsWith("line 1: a config.json is an object, this is an array"));
  EXPECT_THAT(refusal("{}"), HasSubstr("\"num_hidden_layers\" is missing"));
  EXPECT_THAT(refusal("{\n\"num_hidden_layers\": 513}"),
              StartsWith("line 2: \"num_hidden_layers\" is 513, allowed is a whole number from 1"));
  EXPECT_THAT(refusal("{\"num_hidden_layers\": 1e3}"), HasSubstr("is 1e3, allowed is a whole"));
}

// --- windows by a model's own rule

std::string FullLayers(const std::string& members) {
  const HfModel model = Imported(Small(members));
  const auto geometry = MakeGeometry(model.shape, Precision::kBf16);
  EXPECT_TRUE(geometry.ok()) << geometry.status();
  std::vector<int32_t> full;
  for (int32_t layer = 0; geometry.ok() && layer < geometry->layers; ++layer) {
    if (geometry->layer[layer].window == 0) full.push_back(layer);
  }
  return FormatLayerList(full);
}

TEST(HfWindows, QwenSlidesFromMaxWindowLayersOnIfItUsesWindowsAtAll) {
  EXPECT_EQ(FullLayers(R"("model_type": "qwen2", "use_sliding_window": true,
                          "sliding_window": 64, "max_window_layers": 2)"),
            "0,1");
  EXPECT_EQ(FullLayers(R"("model_type": "qwen2", "use_sliding_window": false,
                          "sliding_window": 64, "max_window_layers": 2)"),
            "0-3");
}

TEST(HfWindows, APatternNamesEveryNthLayerAsFull) {
  EXPECT_EQ(FullLayers(R"("model_type": "gemma3_text", "sliding_window_pattern": 2)"), "1,3");
  EXPECT_EQ(FullLayers(R"("model_type": "cohere2", "sliding_window_pattern": 3)"), "2");
}

TEST(HfWindows, LayerTypesWinOverTheRuleOfTheType) {
  EXPECT_EQ(FullLayers(R"("model_type": "gemma3_text", "layer_types": ["full_attention",
            "sliding_attention", "sliding_attention", "full_attention"])"),
            "0,3");
}

TEST(HfWindows, NullIsNoWindowWhateverTheTypesDefault) {
  EXPECT_EQ(FullLayers(R"("model_type": "mistral", "sliding_window": null)"), "0-3");
  EXPECT_EQ(FullLayers(R"("model_type": "gemma2", "sliding_window": null)"), "0-3");
  EXPECT_EQ(FullLayers(R"("model_type": "gemma2")"), "1,3");
}

TEST(HfScores, SoftcapAndScaleComeFromTheirKeysOrTheTypesDefaults) {
  EXPECT_EQ(Imported(Small(R"("model_type": "gemma2")")).shape.softcap, 50.0F);
  EXPECT_EQ(
      Imported(Small(R"("model_type": "gemma2", "attn_logit_softcapping": null)")).shape.softcap,
      0.0F);
  EXPECT_EQ(
      Imported(Small(R"("model_type": "gemma2", "query_pre_attn_scalar": 64)")).shape.sm_scale,
      0.125F);
  EXPECT_EQ(Imported(Small(R"("model_type": "granite", "num_key_value_heads": 8,
                              "attention_multiplier": 0.0078125)"))
                .shape.sm_scale,
            0.0078125F);
}

TEST(HfHeads, WithoutKvHeadsEveryQueryHeadHasItsOwn) {
  EXPECT_EQ(Imported(Small(R"("model_type": "llama")")).shape.kv_heads, 32);
  EXPECT_EQ(Imported(Small(R"("model_type": "llama", "num_key_value_heads": null)")).shape.kv_heads,
            32);
}

// --- bytes of a step

TEST(HfWeights, AStepReadsAllWeightsButTheInputEmbedding) {
  // Llama 3.1 8B: 16,059,990,016 less 128,256 x 4,096 x 2.
  const auto model = ImportFile("llama_3_1_8b");
  ASSERT_TRUE(model.ok());
  EXPECT_EQ(model->weights.BytesPerStep(0), 16'059'990'016.0 - 1'050'673'152.0);
}

TEST(HfWeights, ATiedEmbeddingIsReadAsTheHead) {
  // SmolLM2 135M: 2 x (30 x (884,736 + 2,654,208) + 28,311,552).
  const auto model = ImportFile("smollm2_135m");
  ASSERT_TRUE(model.ok());
  EXPECT_EQ(model->weights.BytesPerStep(0), 268'959'744.0);
}

TEST(HfWeights, ActivationsGrowWithTheBatch) {
  // Llama 3.1 8B, elements of one sequence: a layer's attention 4,096 + 6,144 + 4,096 + 4,096, its
  // MLP 4,096 + 2 x 14,336 + 14,336 + 4,096, then 4,096 + 128,256 for the head, 2 bytes each.
  const auto model = ImportFile("llama_3_1_8b");
  ASSERT_TRUE(model.ok());
  EXPECT_EQ(model->weights.BytesPerStep(1) - model->weights.BytesPerStep(0),
            2.0 * (32 * (18'432 + 51'200) + 132'352));
}

TEST(HfWeights, AStepTouchesTheExpertsThatItsBatchDraws) {
  // gpt-oss 20B: 4 of 32. One sequence touches 4, two touch 32 x (1 - (28/32)^2) = 7.5, many all.
  const auto model = ImportFile("gpt_oss_20b");
  ASSERT_TRUE(model.ok());
  EXPECT_DOUBLE_EQ(model->weights.ExpertsTouched(1), 4.0);
  EXPECT_DOUBLE_EQ(model->weights.ExpertsTouched(2), 7.5);
  EXPECT_NEAR(model->weights.ExpertsTouched(1000), 32.0, 1e-9);
  // 3 x 2880 x 2880 at 4.25 bits; attention 24 x 26,542,080, routers 24 x 92,160 and the head
  // 201,088 x 2,880 at 2 bytes.
  EXPECT_EQ(model->weights.expert_bytes, 13'219'200.0);
  EXPECT_EQ(model->weights.BytesPerStep(1) - model->weights.activation_bytes_per_seq,
            1'274'019'840.0 + 4'423'680.0 + 1'158'266'880.0 + 24 * 4 * 13'219'200.0);
}

TEST(HfWeights, SharedAndDenseLayersOfAMixtureCount) {
  // 4 layers, the first dense: 4096 x 1 x 3; then 8 experts of width 2 and a shared one, k = 2.
  const HfWeights weights = Imported(Small(R"("model_type": "some_moe", "num_key_value_heads": 8,
                        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
                        "moe_intermediate_size": 2, "first_k_dense_replace": 1)"))
                                .weights;
  EXPECT_EQ(weights.expert_layers, 3);
  EXPECT_EQ(weights.expert_bytes, 2.0 * 3 * 4096 * 2);
  EXPECT_EQ(weights.dense_mlp_bytes, 2.0 * (3 * 4096 * (1 * 1 + 3 * 2) + 3 * 4096 * 8));
}

TEST(HfWeights, AQuantisationThatWeCannotReadLeavesTheBytesUnknown) {
  const auto quantized = [](absl::string_view config) {
    return Imported(
               Small(absl::StrCat(R"("model_type": "llama", "quantization_config": )", config)))
        .weights;
  };
  const double plain = Imported(Small(R"("model_type": "llama")")).weights.attention_bytes;
  EXPECT_FALSE(quantized(R"({"quant_method": "compressed-tensors"})").known);
  EXPECT_EQ(quantized(R"({"quant_method": "fp8"})").attention_bytes, plain / 2);
  EXPECT_EQ(quantized(R"({"quant_method": "gptq", "bits": 4})").attention_bytes, plain / 4);
  EXPECT_EQ(quantized(R"({"quant_method": "mxfp4"})").attention_bytes, plain);
}

// --- from a configuration file

absl::StatusOr<Loaded> LoadModel(const std::string& members) {
  return LoadText("models { name: \"m\" " + members + " }", Format::kTextproto, "file",
                  "tests/data", CommandLine(), {});
}

TEST(HfConfig, AConfigurationTakesTheShapeAndTheBytes) {
  const auto loaded = LoadModel("hf_config: \"hf/llama_3_1_8b.json\" expected_seqs: 32");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->models[0].geometry.layers, 32);
  EXPECT_EQ(loaded->options.models[0].other_bytes,
            16'059'990'016 - 1'050'673'152 + 32 * 2 * (32 * (18'432 + 51'200) + 132'352));
}

TEST(HfConfig, GivenBytesWinOverTheEstimate) {
  const auto loaded = LoadModel("hf_config: \"hf/llama_3_1_8b.json\" other_bytes: 5");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->options.models[0].other_bytes, 5);
}

TEST(HfConfig, AnErrorNamesModelFileAndLine) {
  const auto missing = LoadModel("hf_config: \"hf/none.json\"");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.status().message()),
              StartsWith("model \"m\": tests/data/hf/none.json: cannot be read"));
  const auto broken = LoadModel("hf_config: \"hf_shapes.txt\"");
  EXPECT_THAT(std::string(broken.status().message()),
              StartsWith("model \"m\": hf_shapes.txt:1: expected a value"));
}

// At batch 32 x 8192 tokens: Llama reads 131,072 bytes a token beside 15,009,316,864 bytes of
// weights and 32 x 4,721,152 of activations; Gemma 3 27B reads 8,192 bytes a token and layer, in 10
// layers all tokens and in 52 the latest 1,024.
TEST(HfConfig, TheShareOfRealModelsIsTheOneWorkedByHand) {
  const auto llama = ImportFile("llama_3_1_8b");
  ASSERT_TRUE(llama.ok());
  ModelOptions options = llama->shape;
  options.expected_seqs = 32;
  options.expected_tokens = 8192;
  ApplyHfModel(*llama, &options);
  const auto planned = PlanModel(options, PolicyOptions(), nullptr);
  ASSERT_TRUE(planned.ok()) << planned.status();
  EXPECT_NEAR(planned->decision.cache_share, 34'359'738'368.0 / 49'520'132'096.0, 1e-9);

  const auto gemma = ImportFile("gemma_3_27b");
  ASSERT_TRUE(gemma.ok());
  const auto geometry = MakeGeometry(gemma->shape, Precision::kBf16);
  ASSERT_TRUE(geometry.ok());
  EXPECT_EQ(KvBytesReadBf16(*geometry, 32, 8192), 32.0 * (10 * 8192 + 52 * 1024) * 8192);
}

}  // namespace
}  // namespace fp8kvd::config
