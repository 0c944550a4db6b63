// kernels/reference/format.h: the format by itself, as plain functions on row-major arrays: for
// learning what fp8_kv does to given K and V without a daemon. These functions, Fp8KVCache and
// kv_cache_share (config/cache_share.h) have one spelling everywhere, in C++, in Python and in what
// is written about them; tests/py compares the two languages.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/reference/decode.h"

namespace fp8kvd::kernels::reference {

// Codes [rows, head_dim] and one scale per row.
struct Fp8Rows {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
};
Fp8Rows quantize_fp8_kv(const std::vector<uint16_t>& rows, int32_t head_dim);

// K and V of a batch of sequences of one layer, as codes and scales. Tokens are written once, when
// they are appended, and never requantised.
class Fp8KVCache {
 public:
  Fp8KVCache(int32_t seqs, int32_t kv_heads, int32_t head_dim);

  // k and v: [tokens, kv_heads, head_dim] bf16, placed after what sequence seq holds.
  void append(int32_t seq, const std::vector<uint16_t>& k, const std::vector<uint16_t>& v);

  int32_t seqs() const { return static_cast<int32_t>(k_.size()); }
  int32_t kv_heads() const { return kv_heads_; }
  int32_t head_dim() const { return head_dim_; }
  int32_t seq_len(int32_t seq) const;
  const Fp8Rows& k(int32_t seq) const { return k_[seq]; }
  const Fp8Rows& v(int32_t seq) const { return v_[seq]; }

 private:
  int32_t kv_heads_;
  int32_t head_dim_;
  std::vector<Fp8Rows> k_;  // [seqs]
  std::vector<Fp8Rows> v_;
};

// One query token per sequence, which sees the sequence's first seq_lens[i]
// tokens (0: out is 0). q: [seqs, q_heads, head_dim] bf16, q head h reads KV head h / (q_heads /
// kv_heads). Returns [seqs, q_heads, head_dim].
std::vector<double> fp8_kv_attention(const std::vector<uint16_t>& q, int32_t q_heads,
                                     const Fp8KVCache& cache, const std::vector<int32_t>& seq_lens,
                                     float sm_scale);

// What the format costs on rows that come in parts, as relative L2 of (codes * scale - row): of all
// rows together, and of the worst row. Without a row other than zeros both are 0.
class RowsErrorSum {
 public:
  explicit RowsErrorSum(int32_t head_dim) : head_dim_(head_dim) {}
  void Add(const std::vector<uint16_t>& rows);  // [n, head_dim] bf16
  double overall() const;
  double worst_row() const { return worst_row_; }

 private:
  int32_t head_dim_;
  double error_ = 0.0;  // squared, as is the next
  double norm_ = 0.0;
  double worst_row_ = 0.0;
};

// What the format costs on given K and V [rows, head_dim] bf16.
struct Fp8KvErrorResult {
  double k = 0.0;
  double v = 0.0;
  double k_worst_row = 0.0;
  double v_worst_row = 0.0;
};
Fp8KvErrorResult fp8_kv_error(const std::vector<uint16_t>& k, const std::vector<uint16_t>& v,
                              int32_t head_dim);

}  // namespace fp8kvd::kernels::reference
