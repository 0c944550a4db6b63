#include "kernels/reference/decode.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/bf16.h"
#include "kernels/e4m3.h"

namespace fp8kvd::kernels::reference {
namespace {

// The cache's tokens [0, end) as numbers, [end, kv_heads, head_dim].
std::vector<double> Numbers(const DecodeInput& input, const KvRows& rows, int32_t end) {
  std::vector<double> numbers(int64_t{end} * input.kv_heads * input.head_dim);
  for (size_t at = 0; at < numbers.size(); ++at) {
    if (input.precision == Precision::kFp8Kv) {
      const float scale = rows.scales[at / input.head_dim];
      numbers[at] = static_cast<double>(E4m3Value(rows.codes[at])) * static_cast<double>(scale);
    } else {
      numbers[at] = static_cast<double>(Bf16ToFloat(rows.rows[at]));
    }
  }
  return numbers;
}

// One query head of one query token, into place `at` of the output.
void DecodeHead(const DecodeInput& input, const std::vector<double>& k,
                const std::vector<double>& v, int32_t j, int32_t q_head, DecodeOutput& output) {
  const int32_t head_dim = input.head_dim;
  const int32_t kv_head = q_head / input.group;
  const int64_t at = int64_t{j} * input.kv_heads * input.group + q_head;
  const int32_t last = input.pos + j;
  const int32_t first = input.window == 0 ? 0 : std::max(0, last - input.window + 1);
  const auto row_of = [&](const std::vector<double>& rows, int32_t token) {
    return &rows[(int64_t{token} * input.kv_heads + kv_head) * head_dim];
  };
  std::vector<double> q(head_dim);
  for (int32_t i = 0; i < head_dim; ++i) {
    q[i] = static_cast<double>(Bf16ToFloat(input.q[at * head_dim + i]));
  }

  const double sm_scale = static_cast<double>(input.sm_scale);
  const double softcap = static_cast<double>(input.softcap);
  std::vector<double> scores;
  double largest = -std::numeric_limits<double>::infinity();
  for (int32_t token = first; token <= last; ++token) {
    const double* k_row = row_of(k, token);
    double dot = 0.0;
    double dot_abs = 0.0;
    for (int32_t i = 0; i < head_dim; ++i) {
      dot += q[i] * k_row[i];
      dot_abs += std::fabs(q[i] * k_row[i]);
    }
    double score = dot * sm_scale;
    if (softcap > 0.0) score = softcap * std::tanh(score / softcap);
    scores.push_back(score);
    largest = std::max(largest, score);
    output.score_abs[at] = std::max(output.score_abs[at], dot_abs * std::fabs(sm_scale));
  }
  const bool has_sink = input.sink_logits != nullptr;
  const double sink = has_sink ? static_cast<double>(input.sink_logits[q_head]) : 0.0;
  if (has_sink) largest = std::max(largest, sink);
  if (largest == -std::numeric_limits<double>::infinity()) {  // nothing to see: out stays 0
    output.lse[at] = largest;
    return;
  }

  double sum = has_sink ? std::exp(sink - largest) : 0.0;
  for (const double score : scores) sum += std::exp(score - largest);
  output.lse[at] = largest + std::log(sum);
  double* out = &output.out[at * head_dim];
  double* out_abs = &output.out_abs[at * head_dim];
  for (int32_t token = first; token <= last; ++token) {
    const double p = std::exp(scores[token - first] - largest) / sum;
    const double* v_row = row_of(v, token);
    for (int32_t i = 0; i < head_dim; ++i) {
      out[i] += p * v_row[i];
      out_abs[i] += p * std::fabs(v_row[i]);
    }
  }
}

}  // namespace

DecodeOutput Decode(const DecodeInput& input) {
  const int32_t end = std::max(0, input.pos + input.q_len);
  return DecodeNumbers(input, Numbers(input, input.k, end), Numbers(input, input.v, end));
}

DecodeOutput DecodeNumbers(const DecodeInput& input, const std::vector<double>& k,
                           const std::vector<double>& v) {
  const int32_t q_heads = input.kv_heads * input.group;
  const int64_t pairs = int64_t{input.q_len} * q_heads;
  DecodeOutput output;
  output.out.assign(pairs * input.head_dim, 0.0);
  output.out_abs.assign(pairs * input.head_dim, 0.0);
  output.lse.assign(pairs, 0.0);
  output.score_abs.assign(pairs, 0.0);
  for (int32_t j = 0; j < input.q_len; ++j) {
    for (int32_t q_head = 0; q_head < q_heads; ++q_head) {
      DecodeHead(input, k, v, j, q_head, output);
    }
  }
  return output;
}

}  // namespace fp8kvd::kernels::reference
