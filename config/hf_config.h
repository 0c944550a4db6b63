// config/hf_config.h: a Hugging Face config.json to the shape of a model. Knows Llama (with SmolLM2
// and other models of that form), Qwen2, Qwen2.5 and Qwen3, Gemma 2 and 3, Mistral, Mixtral, Phi-3,
// gpt-oss, Cohere 2. An unknown model_type is read as Llama's if it names its KV heads and leaves
// no doubt about windows.
//
// Refuses by name what a cache of K and V rows per layer, with one shape for all layers, cannot
// represent: MLA, chunked attention, ALiBi, cross-attention and encoders, linear-attention and
// state-space layers, layers that share K and V or differ in heads, sparse attention.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "config/hf_weights.h"
#include "config/options.h"

namespace fp8kvd::config {

struct HfModel {
  std::string model_type;  // "gemma3_text": of the language model, where the file nests it
  ModelOptions shape;      // layers to layer_rules; the rest as in a new ModelOptions
  HfWeights weights;
};

// INVALID_ARGUMENT "line N: …" for what is no JSON or of a wrong type; "…: <what> (<key>) …" for
// what cannot be represented. Bound the text by kConfigBytesMax first.
absl::StatusOr<HfModel> ImportHfConfig(absl::string_view text);

// Copies the shape, and other_bytes unless the options have it.
void ApplyHfModel(const HfModel& imported, ModelOptions* options);

}  // namespace fp8kvd::config
