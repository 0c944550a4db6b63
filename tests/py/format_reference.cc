// Answers for tests/py/format_test.py with what the C++ functions of the same names give.
//   py_format_reference quantize HEAD_DIM < rows       codes, then scales
//   py_format_reference error HEAD_DIM < k and v       k, v, k_worst_row, v_worst_row
//   py_format_reference attention SEQS KV_HEADS HEAD_DIM Q_HEADS TOKENS SEQ_LEN < k, v and q
//   py_format_reference share BATCH TOKENS LAYERS KV_HEADS HEAD_DIM OTHER_BYTES
// Rows are raw bf16, k and v of equal size; numbers of the answers are raw too, doubles but for
// codes and scales. attention appends the same k and v to each sequence.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "config/cache_share.h"
#include "kernels/reference/format.h"

namespace {

using Rows = std::vector<uint16_t>;

Rows ReadRows() {
  Rows rows;
  uint16_t row = 0;
  while (std::fread(&row, sizeof(row), 1, stdin) == 1) rows.push_back(row);
  return rows;
}

template <typename T>
void Write(const std::vector<T>& values) {
  std::fwrite(values.data(), sizeof(T), values.size(), stdout);
}

Rows Part(const Rows& rows, size_t begin, size_t size) {
  return {rows.begin() + static_cast<ptrdiff_t>(begin),
          rows.begin() + static_cast<ptrdiff_t>(begin + size)};
}

void Attention(const std::vector<int64_t>& n) {
  const auto seqs = static_cast<int32_t>(n[0]);
  const auto kv_heads = static_cast<int32_t>(n[1]);
  const auto head_dim = static_cast<int32_t>(n[2]);
  const Rows rows = ReadRows();
  const auto cache_size = static_cast<size_t>(n[4] * n[1] * n[2]);
  const Rows q = Part(rows, 2 * cache_size, rows.size() - 2 * cache_size);
  fp8kvd::kernels::reference::Fp8KVCache cache(seqs, kv_heads, head_dim);
  for (int32_t seq = 0; seq < seqs; ++seq) {
    cache.append(seq, Part(rows, 0, cache_size), Part(rows, cache_size, cache_size));
  }
  std::vector<int32_t> seq_lens(seqs, static_cast<int32_t>(n[5]));
  seq_lens[0] = static_cast<int32_t>(n[4]);
  Write(fp8kvd::kernels::reference::fp8_kv_attention(q, static_cast<int32_t>(n[3]), cache, seq_lens,
                                                     0.125F));
}

bool Answer(const std::string& what, const std::vector<int64_t>& n) {
  if (what == "quantize" && n.size() == 1) {
    const auto result = fp8kvd::kernels::reference::quantize_fp8_kv(ReadRows(), n[0]);
    Write(result.codes);
    Write(result.scales);
  } else if (what == "error" && n.size() == 1) {
    const Rows rows = ReadRows();
    const auto error = fp8kvd::kernels::reference::fp8_kv_error(
        Part(rows, 0, rows.size() / 2), Part(rows, rows.size() / 2, rows.size() / 2), n[0]);
    Write(std::vector<double>{error.k, error.v, error.k_worst_row, error.v_worst_row});
  } else if (what == "attention" && n.size() == 6) {
    Attention(n);
  } else if (what == "share" && n.size() == 6) {
    Write(std::vector<double>{fp8kvd::config::kv_cache_share(n[0], n[1], n[2], n[3], n[4], n[5])});
  } else {
    return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int64_t> numbers;
  for (int i = 2; i < argc; ++i) numbers.push_back(std::strtoll(argv[i], nullptr, 10));
  if (argc < 2 || !Answer(argv[1], numbers)) {
    std::fputs("py_format_reference: the head of its source says what it takes\n", stderr);
    return 2;
  }
  return 0;
}
