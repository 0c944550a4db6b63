// config/hf_weights.h: the bytes besides the cache that one step of a model reads, from the
// dimensions in its config.json.
//
//   attention  per layer  hidden * (q_heads + 2 kv_heads) * head_dim + q_heads * head_dim * hidden
//   MLP        per layer  3 * hidden * intermediate (gate, up, down; 2 where a model has no gate)
//   experts    a step of batch B routes each sequence to k of E experts; were they drawn evenly, it
//              touches E * (1 - (1 - k/E)^B) of them, and reads those, the shared ones and the
//              router
//   head       hidden * vocabulary; the input embedding gives B rows and is not counted
//   activations  of each sequence, every product's input read and output written once, 2 bytes each
//
// times the bytes of an element: of dtype, or of quantization_config for the products in layers.
// Norms, biases and scales of quantisation are left out (below 1 % together, 3 % for 4-bit groups
// of 128).
#pragma once

#include <cstdint>

#include "config/tree_fields.h"

namespace fp8kvd::config {

struct HfWeights {
  bool known = true;           // false: a quantisation that we cannot read; do not use the rest
  double attention_bytes = 0;  // all layers
  double dense_mlp_bytes = 0;  // all layers without experts; shared experts and routers too
  double expert_bytes = 0;     // one expert of one layer
  int64_t expert_layers = 0;
  int64_t experts = 0;            // E
  int64_t experts_per_token = 0;  // k
  double head_bytes = 0;
  double embedding_bytes = 0;  // of its own; 0 where it is tied to the head
  double activation_bytes_per_seq = 0;

  // Experts of one layer that a step of this batch touches.
  double ExpertsTouched(int64_t batch) const;
  // What a step reads and writes besides the cache.
  double BytesPerStep(int64_t batch) const;
  // What the model takes on a device.
  double TotalBytes() const;
};

// What the shape has too, already checked, and what the model's type implies.
struct HfDims {
  int64_t layers = 0;
  int64_t q_heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t vocab = 0;  // where the file names no vocab_size; 0: it must
  bool gated = true;  // an MLP has gate, up and down, not only up and down
  bool tied = false;  // where the file does not say tie_word_embeddings
};

// fields: of the language model. root: of the whole file, where the quantisation may stand. Errors
// are left in them.
HfWeights ReadHfWeights(const HfDims& dims, TreeFields& fields, TreeFields& root);

}  // namespace fp8kvd::config
