#include "config/hf_weights.h"

#include <cmath>
#include <string>

#include "absl/strings/string_view.h"

namespace fp8kvd::config {
namespace {

constexpr int64_t kDimMax = int64_t{1} << 24;  // of any one dimension; products stay below 2^1023
constexpr double kActivationBytes = 2;

// Bytes of one element.
struct ElementBytes {
  bool known = true;
  double plain = 2;   // embedding, head, routers
  double linear = 2;  // products in layers
  double expert = 2;  // experts
};

ElementBytes ReadElementBytes(TreeFields& fields, TreeFields& root) {
  ElementBytes bytes;
  const Tree* quantized = root.Object("quantization_config");
  if (quantized == nullptr) quantized = fields.Object("quantization_config");
  if (quantized == nullptr) return bytes;

  TreeFields quantization(*quantized);
  const std::string method = quantization.Text("quant_method");
  if (method == "mxfp4") {
    bytes.expert = 4.25 / 8;  // 4 bits and a scale byte per 32; attention stays as it is
  } else if (method == "fp8" || method == "fbgemm_fp8") {
    bytes.linear = bytes.expert = 1;
  } else if (method == "gptq" || method == "awq") {
    bytes.linear = bytes.expert =
        static_cast<double>(quantization.Int({"bits", "w_bit"}, 4, 1, 16)) / 8;
  } else if (method == "bitsandbytes") {
    bytes.linear = bytes.expert = quantization.Bool("load_in_4bit", false) ? 0.5 : 1;
  } else {
    bytes.known = false;
  }
  if (!quantization.status().ok()) bytes.known = false;
  return bytes;
}

// Whether layer `layer` has experts: as DeepSeek (first_k_dense_replace) and Qwen (mlp_only_layers,
// decoder_sparse_step) say it.
int64_t CountExpertLayers(int64_t layers, TreeFields& fields) {
  const int64_t dense_first = fields.Int({"first_k_dense_replace"}, 0, 0, kDimMax);
  const int64_t step = fields.Int({"decoder_sparse_step"}, 1, 1, kDimMax);
  const Tree* dense_only = fields.Array("mlp_only_layers");
  int64_t count = 0;
  for (int64_t layer = dense_first; layer < layers; ++layer) {
    bool dense = (layer + 1) % step != 0;
    for (size_t i = 0; dense_only != nullptr && i < dense_only->children.size(); ++i) {
      dense = dense || dense_only->children[i].text == std::to_string(layer);
    }
    if (!dense) ++count;
  }
  return count;
}

}  // namespace

double HfWeights::ExpertsTouched(int64_t batch) const {
  if (experts == 0) return 0;
  const double e = static_cast<double>(experts);
  const double missed = 1.0 - static_cast<double>(experts_per_token) / e;
  return e * (1.0 - std::pow(missed, static_cast<double>(batch)));
}

double HfWeights::BytesPerStep(int64_t batch) const {
  return attention_bytes + dense_mlp_bytes + head_bytes +
         static_cast<double>(expert_layers) * ExpertsTouched(batch) * expert_bytes +
         static_cast<double>(batch) * activation_bytes_per_seq;
}

double HfWeights::TotalBytes() const {
  return attention_bytes + dense_mlp_bytes + head_bytes + embedding_bytes +
         static_cast<double>(expert_layers) * static_cast<double>(experts) * expert_bytes;
}

HfWeights ReadHfWeights(const HfDims& dims, TreeFields& fields, TreeFields& root) {
  const ElementBytes bytes = ReadElementBytes(fields, root);
  const auto hidden = static_cast<double>(fields.Int({"hidden_size"}, 0, 1, kDimMax));
  const auto inter = static_cast<double>(fields.Int({"intermediate_size"}, 0, 0, kDimMax));
  const auto vocab = static_cast<double>(fields.Int({"vocab_size"}, dims.vocab, 0, kDimMax));
  const auto layers = static_cast<double>(dims.layers);
  const auto q_width = static_cast<double>(dims.q_heads * dims.head_dim);
  const auto kv_width = static_cast<double>(dims.kv_heads * dims.head_dim);
  const double products = dims.gated ? 3 : 2;  // of an MLP

  HfWeights weights;
  weights.experts =
      fields.Int({"num_local_experts", "num_experts", "n_routed_experts"}, 0, 0, kDimMax);
  weights.experts_per_token =
      fields.Int({"num_experts_per_tok", "experts_per_token"}, weights.experts, 0, weights.experts);
  const auto expert_inter = static_cast<double>(
      fields.Int({"moe_intermediate_size"}, static_cast<int64_t>(inter), 0, kDimMax));
  double shared_inter =
      static_cast<double>(fields.Int({"shared_expert_intermediate_size"}, 0, 0, kDimMax));
  shared_inter +=
      static_cast<double>(fields.Int({"n_shared_experts"}, 0, 0, kDimMax)) * expert_inter;
  if (weights.experts > 0) weights.expert_layers = CountExpertLayers(dims.layers, fields);
  const auto expert_layers = static_cast<double>(weights.expert_layers);
  const double dense_layers = layers - expert_layers;

  weights.known = bytes.known && inter > 0 && vocab > 0;
  weights.attention_bytes = layers * hidden * (2 * q_width + 2 * kv_width) * bytes.linear;
  weights.dense_mlp_bytes =
      (dense_layers * inter + expert_layers * shared_inter) * products * hidden * bytes.linear +
      expert_layers * hidden * static_cast<double>(weights.experts) * bytes.plain;
  weights.expert_bytes = products * hidden * expert_inter * bytes.expert;
  weights.head_bytes = hidden * vocab * bytes.plain;
  weights.embedding_bytes =
      fields.Bool("tie_word_embeddings", root.Bool("tie_word_embeddings", dims.tied))
          ? 0
          : weights.head_bytes;

  // Of an MLP of this width: its input twice (it adds to the residual), gate and up, their product.
  const double per_layer = hidden + (q_width + 2 * kv_width) + q_width + hidden;
  const double mlp_width =
      dense_layers * inter +
      expert_layers *
          (static_cast<double>(weights.experts_per_token) * expert_inter + shared_inter);
  weights.activation_bytes_per_seq = kActivationBytes * (layers * (per_layer + 2 * hidden) +
                                                         products * mlp_width + hidden + vocab);
  return weights;
}

}  // namespace fp8kvd::config
