#include "config/hf_config.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

#include "config/json.h"
#include "config/layer_list.h"
#include "config/model.h"
#include "config/tree_fields.h"

namespace fp8kvd::config {
namespace {

// How a model_type says which layers have a window, when it does not list layer_types.
enum class Windows : uint8_t {
  kUnknown,    // sliding_window without layer_types is refused
  kNone,       // sliding_window is not read
  kAll,        // every layer has sliding_window, if it is not null
  kQwen,       // layers from max_window_layers on, if use_sliding_window
  kEven,       // layers 0, 2, 4, …
  kAllButNth,  // all but every n-th: sliding_window_pattern
};

// What a file may leave out, because transformers has it as a default, and what the type implies.
// 0: no default.
struct ModelType {
  const char* name;
  int64_t q_heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t window = 0;
  int64_t pattern = 0;
  double query_pre_attn_scalar = 0;
  double softcap = 0;
  int64_t vocab = 0;
  Windows windows = Windows::kUnknown;
  bool has_sinks = false;
  bool gated = true;  // its MLP
  bool tied = false;  // embedding and head
};

constexpr ModelType kModelTypes[] = {
    {.name = "llama", .windows = Windows::kNone},
    {.name = "mistral", .kv_heads = 8, .windows = Windows::kAll},
    {.name = "mixtral", .kv_heads = 8, .windows = Windows::kAll},
    {.name = "phi3", .windows = Windows::kAll},
    {.name = "starcoder2", .windows = Windows::kAll, .gated = false},
    {.name = "phi", .windows = Windows::kNone, .gated = false},
    {.name = "qwen2", .windows = Windows::kQwen},
    {.name = "qwen2_moe", .windows = Windows::kQwen},
    {.name = "qwen3", .head_dim = 128, .windows = Windows::kQwen},
    {.name = "qwen3_moe", .windows = Windows::kQwen},
    {.name = "gemma", .head_dim = 256, .windows = Windows::kNone, .tied = true},
    {.name = "gemma2",
     .q_heads = 8,
     .kv_heads = 4,
     .head_dim = 256,
     .window = 4096,
     .query_pre_attn_scalar = 256,
     .softcap = 50,
     .windows = Windows::kEven,
     .tied = true},
    {.name = "gemma3_text",
     .q_heads = 8,
     .kv_heads = 4,
     .head_dim = 256,
     .window = 4096,
     .pattern = 6,
     .query_pre_attn_scalar = 256,
     .vocab = 262208,
     .windows = Windows::kAllButNth,
     .tied = true},
    {.name = "cohere2", .window = 4096, .pattern = 4, .windows = Windows::kAllButNth, .tied = true},
    {.name = "gpt_oss",
     .q_heads = 64,
     .kv_heads = 8,
     .head_dim = 64,
     .window = 128,
     .windows = Windows::kEven,
     .has_sinks = true},
};
constexpr ModelType kUnknownType = {.name = ""};

// Keys whose presence (not null, false, 0 or empty) says that the model cannot be represented.
struct Refusal {
  const char* key;
  const char* what;
};
constexpr const char* kMla = "multi-head latent attention (MLA)";
constexpr const char* kChunked = "chunked attention";
constexpr const char* kAlibi = "ALiBi position biases";
constexpr const char* kCross = "cross-attention or an encoder";
constexpr const char* kLinear = "linear-attention or state-space layers";
constexpr const char* kSparse = "sparse attention";
constexpr const char* kUneven = "layers that differ in their heads";
constexpr Refusal kRefusedKeys[] = {
    {"kv_lora_rank", kMla},
    {"attention_chunk_size", kChunked},
    {"alibi", kAlibi},
    {"use_alibi", kAlibi},
    {"is_encoder_decoder", kCross},
    {"add_cross_attention", kCross},
    {"cross_attention_layers", kCross},
    {"num_kv_shared_layers", "layers that share K and V"},
    {"attn_layer_period", kLinear},
    {"attn_layer_indices", kLinear},
    {"hybrid_override_pattern", kLinear},
    {"layers_block_type", kLinear},
    {"block_types", kLinear},
    {"attn_type_list", kLinear},
    {"full_attention_interval", kLinear},
    {"linear_attn_config", kLinear},
    {"linear_num_key_heads", kLinear},
    {"mamba_d_state", kLinear},
    {"ssm_cfg", kLinear},
    {"state_size", kLinear},
    {"index_topk", kSparse},
    {"sparse_config", kSparse},
    {"block_configs", kUneven},
    {"swa_num_key_value_heads", kUneven},
    {"swa_head_dim", kUneven},
};
constexpr Refusal kRefusedTypes[] = {
    {"bloom", kAlibi},       {"bert", kCross},    {"roberta", kCross},
    {"xlm-roberta", kCross}, {"t5", kCross},      {"distilbert", kCross},
    {"mamba", kLinear},      {"mamba2", kLinear}, {"rwkv", kLinear},
};

absl::Status CannotRepresent(absl::string_view what, absl::string_view key) {
  return absl::InvalidArgumentError(
      absl::StrCat("this model has ", what, " (", key, "), which the cache cannot represent; ",
                   "allowed is attention with one shape of K and V rows in every layer, full or ",
                   "with a sliding window; serve it elsewhere"));
}

bool IsSet(const Tree& value) {
  switch (value.kind) {
    case Tree::Kind::kNull:
      return false;
    case Tree::Kind::kBool:
      return value.text == "true";
    case Tree::Kind::kNumber:
      return value.text != "0";
    case Tree::Kind::kText:
    case Tree::Kind::kWord:
      return !value.text.empty();
    case Tree::Kind::kArray:
    case Tree::Kind::kObject:
      return !value.children.empty();
  }
  return true;
}

absl::Status CheckLayerTypes(const Tree& config) {
  const Tree* layer_types = config.Find("layer_types");
  if (layer_types == nullptr) return absl::OkStatus();
  for (const Tree& entry : layer_types->children) {
    if (entry.text == "full_attention" || entry.text == "sliding_attention") continue;
    return CannotRepresent(entry.text == "chunked_attention" ? kChunked : kLinear,
                           absl::StrCat("layer_types: ", absl::CEscape(entry.text.substr(0, 40))));
  }
  return absl::OkStatus();
}

absl::Status CheckRepresentable(const Tree& config, const std::string& model_type) {
  for (const Refusal& refused : kRefusedTypes) {
    if (model_type == refused.key) {
      return CannotRepresent(refused.what, absl::StrCat("model_type ", refused.key));
    }
  }
  for (const Refusal& refused : kRefusedKeys) {
    const Tree* value = config.Find(refused.key);
    if (value != nullptr && IsSet(*value)) return CannotRepresent(refused.what, refused.key);
  }
  const Tree* positions = config.Find("position_embedding_type");
  if (positions != nullptr && positions->text == "alibi") {
    return CannotRepresent(kAlibi, "position_embedding_type");
  }
  const Tree* attention = config.Find("attn_config");  // as MPT nests it
  const Tree* alibi = attention == nullptr ? nullptr : attention->Find("alibi");
  if (alibi != nullptr && IsSet(*alibi)) return CannotRepresent(kAlibi, "attn_config.alibi");
  return CheckLayerTypes(config);
}

const ModelType& FindType(const std::string& model_type) {
  for (const ModelType& known : kModelTypes) {
    if (model_type == known.name) return known;
  }
  return kUnknownType;
}

// From layer_types, which CheckRepresentable has seen: the layers that they call sliding.
absl::StatusOr<std::vector<bool>> SlidingFromTypes(const Tree& layer_types, int64_t layers) {
  if (static_cast<int64_t>(layer_types.children.size()) != layers) {
    return absl::InvalidArgumentError(absl::StrCat(
        "line ", layer_types.line, ": \"layer_types\" has ", layer_types.children.size(),
        " entries, allowed is one for each of num_hidden_layers ", layers));
  }
  std::vector<bool> sliding;
  for (const Tree& entry : layer_types.children) {
    sliding.push_back(entry.text == "sliding_attention");
  }
  return sliding;
}

// From the rule of the model's type.
std::vector<bool> SlidingFromRule(const ModelType& type, int64_t layers, TreeFields& fields) {
  std::vector<bool> sliding(layers, false);
  const int64_t pattern = fields.Int({"sliding_window_pattern", "_sliding_window_pattern"},
                                     type.pattern, 0, kLayersMax);
  const int64_t qwen_first = fields.Int({"max_window_layers"}, layers, 0, INT32_MAX);
  const bool qwen_slides = fields.Bool("use_sliding_window", false);
  for (int64_t layer = 0; layer < layers; ++layer) {
    switch (type.windows) {
      case Windows::kUnknown:
      case Windows::kNone:
        break;
      case Windows::kAll:
        sliding[layer] = true;
        break;
      case Windows::kQwen:
        sliding[layer] = qwen_slides && layer >= qwen_first;
        break;
      case Windows::kEven:
        sliding[layer] = layer % 2 == 0;
        break;
      case Windows::kAllButNth:
        sliding[layer] = pattern == 0 || (layer + 1) % pattern != 0;
        break;
    }
  }
  return sliding;
}

// Window, and the layers that differ, in the compact form of ModelOptions: what most layers have is
// the model's own.
void PutWindows(const std::vector<bool>& sliding, int32_t window, ModelOptions* shape) {
  const auto slide = std::count(sliding.begin(), sliding.end(), true);
  const bool most = slide * 2 >= static_cast<int64_t>(sliding.size());
  std::vector<int32_t> others;
  for (size_t layer = 0; layer < sliding.size(); ++layer) {
    if (sliding[layer] != most) others.push_back(static_cast<int32_t>(layer));
  }
  shape->window = most ? window : 0;
  if (others.empty()) return;
  LayerRule rule;
  rule.layers = FormatLayerList(others);
  rule.window = most ? 0 : window;
  shape->layer_rules.push_back(std::move(rule));
}

absl::Status ReadWindows(const ModelType& type, TreeFields& fields, ModelOptions* shape) {
  // An explicit null is no window, whatever the type's default.
  const Tree* given = fields.Member("sliding_window");
  const int64_t fallback = given == nullptr ? type.window : 0;
  const auto window = static_cast<int32_t>(fields.Int({"sliding_window"}, fallback, 0, kSeqLenMax));
  std::vector<bool> sliding;
  if (const Tree* layer_types = fields.Array("layer_types"); layer_types != nullptr) {
    auto listed = SlidingFromTypes(*layer_types, shape->layers);
    if (!listed.ok()) return listed.status();
    sliding = *std::move(listed);
  } else {
    if (type.windows == Windows::kUnknown && window > 0 &&
        fields.Bool("use_sliding_window", true)) {
      return absl::InvalidArgumentError(
          "\"sliding_window\" is set, and neither layer_types nor a known model_type says for "
          "which "
          "layers; give the shape by hand instead of hf_config");
    }
    sliding = SlidingFromRule(type, shape->layers, fields);
  }
  const bool slides = std::find(sliding.begin(), sliding.end(), true) != sliding.end();
  if (window > 0) PutWindows(sliding, window, shape);
  if (window == 0 && slides && fields.Has("layer_types")) {
    return absl::InvalidArgumentError(
        "\"layer_types\" names sliding layers, and \"sliding_window\" does not say how many tokens "
        "they see; add it");
  }
  return fields.status();
}

// Heads and dimensions, with the type's defaults.
void ReadHeads(const ModelType& type, TreeFields& fields, ModelOptions* shape) {
  shape->layers = static_cast<int32_t>(fields.Int({"num_hidden_layers"}, 0, 1, kLayersMax));
  if (shape->layers == 0) fields.Missing("num_hidden_layers");
  shape->q_heads =
      static_cast<int32_t>(fields.Int({"num_attention_heads"}, type.q_heads, 1, kQHeadsMax));
  if (shape->q_heads == 0) fields.Missing("num_attention_heads");
  const bool says_kv_heads = fields.Has("num_key_value_heads");
  if (*type.name == '\0' && !says_kv_heads) fields.Missing("num_key_value_heads");
  const int64_t kv_default = type.kv_heads > 0 ? type.kv_heads : shape->q_heads;
  shape->kv_heads =
      static_cast<int32_t>(fields.Int({"num_key_value_heads"}, kv_default, 1, kKvHeadsMax));
  const int64_t hidden = fields.Int({"hidden_size"}, 0, 1, 1 << 24);
  if (hidden == 0) fields.Missing("hidden_size");
  const int64_t divided = shape->q_heads > 0 ? hidden / shape->q_heads : 0;
  shape->head_dim = static_cast<int32_t>(
      fields.Int({"head_dim"}, type.head_dim > 0 ? type.head_dim : divided, 1, 1 << 16));
}

absl::Status CheckHeadDim(TreeFields& fields, const ModelOptions& shape) {
  const int64_t v_head_dim = fields.Int({"v_head_dim"}, shape.head_dim, 1, 1 << 16);
  if (v_head_dim != shape.head_dim) {
    return CannotRepresent("K and V rows of different sizes",
                           absl::StrCat("head_dim ", shape.head_dim, ", v_head_dim ", v_head_dim));
  }
  if (std::find(std::begin(kHeadDims), std::end(kHeadDims), shape.head_dim) ==
      std::end(kHeadDims)) {
    return CannotRepresent("heads without a kernel", absl::StrCat("head_dim ", shape.head_dim));
  }
  return absl::OkStatus();
}

// sm_scale where it is not 1/sqrt(head_dim), softcap, sinks.
void ReadScores(const ModelType& type, TreeFields& fields, ModelOptions* shape) {
  const double scalar = fields.Number("query_pre_attn_scalar", type.query_pre_attn_scalar);
  if (scalar > 0) shape->sm_scale = static_cast<float>(1.0 / std::sqrt(scalar));
  const double multiplier = fields.Number("attention_multiplier", 0);  // Granite
  if (multiplier > 0) shape->sm_scale = static_cast<float>(multiplier);
  const bool given = fields.Member("attn_logit_softcapping") != nullptr;
  shape->softcap =
      static_cast<float>(fields.Number("attn_logit_softcapping", given ? 0 : type.softcap));
  shape->has_sinks = type.has_sinks;
}

}  // namespace

absl::StatusOr<HfModel> ImportHfConfig(absl::string_view text) {
  const auto root = ParseJson(text);
  if (!root.ok()) return root.status();
  if (root->kind != Tree::Kind::kObject) {
    return absl::InvalidArgumentError(absl::StrCat(
        "line ", root->line, ": a config.json is an object, this is ", KindName(root->kind)));
  }
  const Tree* nested = root->Find("text_config");  // multimodal models
  const bool nests = nested != nullptr && nested->kind == Tree::Kind::kObject;
  const Tree& config = nests ? *nested : *root;
  TreeFields fields(config);
  TreeFields root_fields(*root);
  HfModel model;
  model.model_type =
      fields.Has("model_type") ? fields.Text("model_type") : root_fields.Text("model_type");
  for (const Tree* object : {&*root, &config}) {
    const absl::Status status = CheckRepresentable(*object, model.model_type);
    if (!status.ok()) return status;
  }
  const ModelType& type = FindType(model.model_type == "gemma3" ? "gemma3_text" : model.model_type);
  ReadHeads(type, fields, &model.shape);
  if (!fields.status().ok()) return fields.status();
  if (absl::Status status = CheckHeadDim(fields, model.shape); !status.ok()) return status;
  if (absl::Status status = ReadWindows(type, fields, &model.shape); !status.ok()) return status;
  ReadScores(type, fields, &model.shape);
  const HfDims dims = {.layers = model.shape.layers,
                       .q_heads = model.shape.q_heads,
                       .kv_heads = model.shape.kv_heads,
                       .head_dim = model.shape.head_dim,
                       .vocab = type.vocab,
                       .gated = type.gated,
                       .tied = type.tied};
  model.weights = ReadHfWeights(dims, fields, root_fields);
  for (const TreeFields* read : {&fields, &root_fields}) {
    if (!read->status().ok()) return read->status();
  }
  // The rest of what a shape must keep is checked in one place.
  model.shape.name = "hf_config";
  if (const auto made = MakeGeometry(model.shape, Precision::kBf16); !made.ok()) {
    return made.status();
  }
  model.shape.name.clear();
  return model;
}

void ApplyHfModel(const HfModel& imported, ModelOptions* options) {
  options->layers = imported.shape.layers;
  options->q_heads = imported.shape.q_heads;
  options->kv_heads = imported.shape.kv_heads;
  options->head_dim = imported.shape.head_dim;
  options->sm_scale = imported.shape.sm_scale;
  options->window = imported.shape.window;
  options->softcap = imported.shape.softcap;
  options->has_sinks = imported.shape.has_sinks;
  options->layer_rules = imported.shape.layer_rules;
  if (!options->other_bytes.has_value() && imported.weights.known) {
    options->other_bytes =
        static_cast<int64_t>(imported.weights.BytesPerStep(options->expected_seqs));
  }
}

}  // namespace fp8kvd::config
