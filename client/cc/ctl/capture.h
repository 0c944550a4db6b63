// client/cc/ctl/capture.h: one layer of a real model's decode attention, from a safetensors file
// (tests/data/captures/README.md says what it holds), and the error that fp8_kv is known to make on
// it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "client/cc/ctl/safetensors.h"

namespace fp8kvd::ctl {

struct Capture {
  std::string model;  // as its authors call it
  int32_t layer = 0;  // 0-based, of that model
  int64_t tokens = 0;
  int64_t steps = 0;
  int32_t q_heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  float sm_scale = 0.0F;
  int32_t window = 0;
  float softcap = 0.0F;
  std::vector<uint16_t> k;         // bf16 [tokens, kv_heads, head_dim]
  std::vector<uint16_t> v;         // the same
  std::vector<uint16_t> q;         // bf16 [steps, q_heads, head_dim]
  std::vector<float> out;          // [steps, q_heads, head_dim]
  std::vector<int32_t> positions;  // [steps] consecutive, the last is tokens - 1

  int64_t kv_row() const { return int64_t{kv_heads} * head_dim; }  // elements of one token of k
  int64_t q_row() const { return int64_t{q_heads} * head_dim; }
};

absl::StatusOr<Capture> ReadCapture(const std::string& path);
absl::StatusOr<Capture> MakeCapture(const Safetensors& file);

// "x/name_layer05.safetensors" -> "x/name_errors.json"; empty when the name is not of that form.
std::string ErrorsPath(const std::string& capture_path);

// Relative L2 of the attention output with K and V in fp8_kv, of one layer: the number
// per_layer.decode.<layer>.row.op of an errors file.
absl::StatusOr<double> ReadExpectedError(const std::string& errors_path, int32_t layer);

}  // namespace fp8kvd::ctl
