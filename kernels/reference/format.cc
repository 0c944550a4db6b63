#include "kernels/reference/format.h"

#include <algorithm>
#include <cmath>

#include "config/base/check.h"
#include "kernels/bf16.h"
#include "kernels/e4m3.h"
#include "kernels/reference/append.h"

namespace fp8kvd::kernels::reference {
namespace {

void AppendRows(const std::vector<uint16_t>& rows, int32_t head_dim, Fp8Rows& to) {
  const Fp8Rows added = quantize_fp8_kv(rows, head_dim);
  to.codes.insert(to.codes.end(), added.codes.begin(), added.codes.end());
  to.scales.insert(to.scales.end(), added.scales.begin(), added.scales.end());
}

struct RowsError {
  double overall = 0.0;
  double worst_row = 0.0;
};

RowsError ErrorOf(const std::vector<uint16_t>& rows, int32_t head_dim) {
  const Fp8Rows quantized = quantize_fp8_kv(rows, head_dim);
  RowsError error;
  double all_error = 0.0;
  double all_norm = 0.0;
  for (size_t row = 0; row < quantized.scales.size(); ++row) {
    const double scale = static_cast<double>(quantized.scales[row]);
    double row_error = 0.0;
    double row_norm = 0.0;
    for (size_t at = row * head_dim; at < (row + 1) * head_dim; ++at) {
      const double exact = static_cast<double>(Bf16ToFloat(rows[at]));
      const double stored = static_cast<double>(E4m3Value(quantized.codes[at])) * scale;
      row_error += (stored - exact) * (stored - exact);
      row_norm += exact * exact;
    }
    if (row_norm > 0.0)
      error.worst_row = std::max(error.worst_row, std::sqrt(row_error / row_norm));
    all_error += row_error;
    all_norm += row_norm;
  }
  if (all_norm > 0.0) error.overall = std::sqrt(all_error / all_norm);
  return error;
}

}  // namespace

Fp8Rows quantize_fp8_kv(const std::vector<uint16_t>& rows, int32_t head_dim) {
  FP8KVD_CHECK(head_dim > 0 && rows.size() % head_dim == 0);
  Fp8Rows result;
  result.codes.resize(rows.size());
  result.scales.resize(rows.size() / head_dim);
  for (size_t row = 0; row < result.scales.size(); ++row) {
    QuantizeRow(&rows[row * head_dim], head_dim, &result.codes[row * head_dim],
                &result.scales[row]);
  }
  return result;
}

Fp8KVCache::Fp8KVCache(int32_t seqs, int32_t kv_heads, int32_t head_dim)
    : kv_heads_(kv_heads), head_dim_(head_dim), k_(seqs), v_(seqs) {}

void Fp8KVCache::append(int32_t seq, const std::vector<uint16_t>& k,
                        const std::vector<uint16_t>& v) {
  FP8KVD_CHECK(k.size() == v.size() && k.size() % (size_t{1} * kv_heads_ * head_dim_) == 0);
  AppendRows(k, head_dim_, k_[seq]);
  AppendRows(v, head_dim_, v_[seq]);
}

int32_t Fp8KVCache::seq_len(int32_t seq) const {
  return static_cast<int32_t>(k_[seq].scales.size()) / kv_heads_;
}

std::vector<double> fp8_kv_attention(const std::vector<uint16_t>& q, int32_t q_heads,
                                     const Fp8KVCache& cache, const std::vector<int32_t>& seq_lens,
                                     float sm_scale) {
  const size_t q_size = size_t{1} * q_heads * cache.head_dim();
  FP8KVD_CHECK(q_heads % cache.kv_heads() == 0 && q.size() == q_size * cache.seqs());
  std::vector<double> out;
  for (int32_t seq = 0; seq < cache.seqs(); ++seq) {
    FP8KVD_CHECK(seq_lens[seq] >= 0 && seq_lens[seq] <= cache.seq_len(seq));
    DecodeInput input;
    input.precision = Precision::kFp8Kv;
    input.k = {cache.k(seq).codes.data(), cache.k(seq).scales.data(), nullptr};
    input.v = {cache.v(seq).codes.data(), cache.v(seq).scales.data(), nullptr};
    input.q = &q[seq * q_size];
    input.pos = seq_lens[seq] - 1;
    input.kv_heads = cache.kv_heads();
    input.group = q_heads / cache.kv_heads();
    input.head_dim = cache.head_dim();
    input.sm_scale = sm_scale;
    const DecodeOutput one = Decode(input);
    out.insert(out.end(), one.out.begin(), one.out.end());
  }
  return out;
}

Fp8KvErrorResult fp8_kv_error(const std::vector<uint16_t>& k, const std::vector<uint16_t>& v,
                              int32_t head_dim) {
  const RowsError k_error = ErrorOf(k, head_dim);
  const RowsError v_error = ErrorOf(v, head_dim);
  return {k_error.overall, v_error.overall, k_error.worst_row, v_error.worst_row};
}

}  // namespace fp8kvd::kernels::reference
