// kernels/reference/decode.h: attention in double precision on the codes and scales that a cache
// holds: the oracle that every backend is measured against. No blocking, no running maximum, one
// loop per index, and the row-major arrays of the definition instead of a backend's layout.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/params.h"

namespace fp8kvd::kernels::reference {

// K or V of one (sequence, layer) in row-major arrays: [tokens, kv_heads, head_dim].
struct KvRows {
  const uint8_t* codes = nullptr;  // fp8_kv
  const float* scales = nullptr;   // fp8_kv, [tokens, kv_heads]
  const uint16_t* rows = nullptr;  // bf16
};

// The terms of kernels::DecodeRow, which has the meaning of each.
struct DecodeInput {
  Precision precision = Precision::kBf16;
  KvRows k;
  KvRows v;
  const uint16_t* q = nullptr;         // [q_len, kv_heads * group, head_dim] bf16
  const float* sink_logits = nullptr;  // [kv_heads * group] or null
  int32_t pos = 0;
  int32_t q_len = 1;
  int32_t kv_heads = 1;
  int32_t group = 1;
  int32_t head_dim = 0;
  int32_t window = 0;
  float sm_scale = 1.0F;
  float softcap = 0.0F;
};

struct DecodeOutput {
  std::vector<double> out;      // [q_len, q_heads, head_dim]
  std::vector<double> out_abs;  // as out, with |v| for v: what an error of P is measured against
  std::vector<double> lse;      // [q_len, q_heads]
  std::vector<double>
      score_abs;  // [q_len, q_heads] largest sum |q k| sm_scale: the scores' own scale
};

DecodeOutput Decode(const DecodeInput& input);

// The same of K and V that are numbers already, [tokens, kv_heads, head_dim] with pos + q_len
// tokens at least; input's own k, v and precision are not looked at.
DecodeOutput DecodeNumbers(const DecodeInput& input, const std::vector<double>& k,
                           const std::vector<double>& v);

}  // namespace fp8kvd::kernels::reference
