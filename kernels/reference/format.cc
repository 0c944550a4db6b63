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

void RowsErrorSum::Add(const std::vector<uint16_t>& rows) {
  const Fp8Rows quantized = quantize_fp8_kv(rows, head_dim_);
  for (size_t row = 0; row < quantized.scales.size(); ++row) {
    const double scale = static_cast<double>(quantized.scales[row]);
    double row_error = 0.0;
    double row_norm = 0.0;
    for (size_t at = row * head_dim_; at < (row + 1) * head_dim_; ++at) {
      const double exact = static_cast<double>(Bf16ToFloat(rows[at]));
      const double stored = static_cast<double>(E4m3Value(quantized.codes[at])) * scale;
      row_error += (stored - exact) * (stored - exact);
      row_norm += exact * exact;
    }
    if (row_norm > 0.0) worst_row_ = std::max(worst_row_, std::sqrt(row_error / row_norm));
    error_ += row_error;
    norm_ += row_norm;
  }
}

double RowsErrorSum::overall() const { return norm_ > 0.0 ? std::sqrt(error_ / norm_) : 0.0; }

Fp8KvErrorResult fp8_kv_error(const std::vector<uint16_t>& k, const std::vector<uint16_t>& v,
                              int32_t head_dim) {
  RowsErrorSum k_sum(head_dim);
  k_sum.Add(k);
  RowsErrorSum v_sum(head_dim);
  v_sum.Add(v);
  return {k_sum.overall(), v_sum.overall(), k_sum.worst_row(), v_sum.worst_row()};
}

}  // namespace fp8kvd::kernels::reference
