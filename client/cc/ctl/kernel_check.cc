#include "client/cc/ctl/kernel_check.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/bf16.h"
#include "kernels/cpu/backend.h"
#include "kernels/e4m3.h"
#include "kernels/reference/decode.h"
#include "kernels/reference/format.h"
#include "kernels/reference/judge.h"

namespace fp8kvd::ctl {
namespace {

using kernels::reference::Answer;
using kernels::reference::AttentionRows;
using kernels::reference::DecodeOutput;
using kernels::reference::Fp8Rows;
using kernels::reference::Judge;
using kernels::reference::Verdict;

constexpr int64_t kPairsMin = 64;

// The caller's own thread alone.
class OneThread final : public kernels::Workers {
 public:
  int32_t threads() const override { return 1; }
  void Run(void (*task)(void* context, int32_t thread), void* context) override {
    task(context, 0);
  }
};

// A query of the rows, and where it stands.
struct Query {
  int64_t step = 0;
  int32_t pos = 0;
};

// Every step where it stands, then halfway down to the start and so on, until there are enough.
std::vector<Query> Queries(const AttentionRows& rows) {
  std::vector<Query> queries;
  const auto steps = static_cast<int64_t>(rows.positions.size());
  const int64_t wanted = std::max(steps, (kPairsMin + rows.kv_heads - 1) / rows.kv_heads);
  for (int64_t i = 0; i < wanted; ++i) {
    const int64_t step = i % steps;
    queries.push_back({step, rows.positions[step] >> std::min<int64_t>(i / steps, 30)});
  }
  return queries;
}

// One sequence on a CPU backend of its own.
class Kernel {
 public:
  explicit Kernel(const AttentionRows& rows) : rows_(rows), backend_(&thread_) {}

  absl::Status Append(int64_t queries) {
    const kernels::KernelShape shape{rows_.head_dim, rows_.group, Precision::kFp8Kv};
    absl::Status status = backend_.WarmUp({&shape, 1}, static_cast<int32_t>(queries), 1,
                                          rows_.kv_heads * rows_.group);
    if (!status.ok()) return status;
    const int64_t pages = (rows_.tokens() + kPageTokens - 1) / kPageTokens;
    stride_ = backend_.BlockBytes(Precision::kFp8Kv, rows_.head_dim) * rows_.kv_heads;
    absl::StatusOr<uint8_t*> pool = backend_.AllocPool(pages * stride_);
    if (!pool.ok()) return pool.status();
    absl::StatusOr<int32_t*> table = backend_.AllocTable(pages);
    if (!table.ok()) return table.status();
    pool_ = *pool;
    table_ = *table;
    for (int32_t page = 0; page < pages; ++page) table_[page] = page;
    const kernels::AppendRow row{.k = rows_.k.data(),
                                 .v = rows_.v.data(),
                                 .block_table = table_,
                                 .base = pool_,
                                 .page_stride = stride_,
                                 .pos = 0,
                                 .n = rows_.tokens(),
                                 .kv_heads = rows_.kv_heads};
    return backend_.Append({&row, 1, rows_.head_dim, Precision::kFp8Kv});
  }

  absl::StatusOr<Answer> Decode(const std::vector<Query>& queries, kernels::OutType out_type) {
    const size_t q_row = size_t{1} * rows_.kv_heads * rows_.group * rows_.head_dim;
    std::vector<float> out(queries.size() * q_row);  // holds as many bf16, too
    const size_t element = out_type == kernels::OutType::kFp32 ? sizeof(float) : sizeof(uint16_t);
    std::vector<kernels::DecodeRow> rows;
    for (size_t i = 0; i < queries.size(); ++i) {
      rows.push_back({.q = rows_.q.data() + static_cast<size_t>(queries[i].step) * q_row,
                      .out = reinterpret_cast<uint8_t*>(out.data()) + i * q_row * element,
                      .lse = nullptr,
                      .sink_logits = nullptr,
                      .block_table = table_,
                      .base = pool_,
                      .page_stride = stride_,
                      .pos = queries[i].pos,
                      .q_len = 1,
                      .kv_heads = rows_.kv_heads,
                      .window = rows_.window,
                      .sm_scale = rows_.sm_scale,
                      .softcap = rows_.softcap});
    }
    absl::Status status = backend_.Decode({.rows = rows.data(),
                                           .rows_count = static_cast<int32_t>(rows.size()),
                                           .head_dim = rows_.head_dim,
                                           .group = rows_.group,
                                           .precision = Precision::kFp8Kv,
                                           .out_type = out_type,
                                           .batch_invariant = false});
    if (!status.ok()) return status;
    if (out_type == kernels::OutType::kFp32) return Answer{std::move(out), {}};
    std::vector<uint16_t> bits(out.size());
    std::memcpy(bits.data(), out.data(), bits.size() * sizeof(uint16_t));
    for (size_t i = 0; i < bits.size(); ++i) out[i] = kernels::Bf16ToFloat(bits[i]);
    return Answer{std::move(out), {}};
  }

 private:
  const AttentionRows& rows_;
  OneThread thread_;
  kernels::cpu::CpuBackend backend_;
  int64_t stride_ = 0;
  uint8_t* pool_ = nullptr;
  int32_t* table_ = nullptr;
};

// What codes are worth under their scales times `factor`; `first` gives every token those of token
// 0.
std::vector<double> Worth(const AttentionRows& rows, const Fp8Rows& stored, double factor,
                          bool first) {
  std::vector<double> numbers(stored.codes.size());
  for (size_t i = 0; i < numbers.size(); ++i) {
    const size_t row = i / rows.head_dim;
    const float scale = stored.scales[first ? row % rows.kv_heads : row];
    numbers[i] = double{kernels::E4m3Value(stored.codes[i])} * double{scale} * factor;
  }
  return numbers;
}

DecodeOutput Reference(const AttentionRows& rows, const std::vector<Query>& queries,
                       const std::vector<double>& k, const std::vector<double>& v) {
  kernels::reference::DecodeInput input;
  input.kv_heads = rows.kv_heads;
  input.group = rows.group;
  input.head_dim = rows.head_dim;
  input.window = rows.window;
  input.sm_scale = rows.sm_scale;
  input.softcap = rows.softcap;
  DecodeOutput all;
  for (const Query& query : queries) {
    input.q = rows.q.data() + query.step * rows.kv_heads * rows.group * rows.head_dim;
    input.pos = query.pos;
    AppendTo(all, kernels::reference::DecodeNumbers(input, k, v));
  }
  return all;
}

Answer AsAnswer(const DecodeOutput& output) { return {{output.out.begin(), output.out.end()}, {}}; }

}  // namespace

absl::StatusOr<KernelCheck> CheckKernel(const AttentionRows& rows) {
  const std::vector<Query> queries = Queries(rows);
  Kernel kernel(rows);
  if (absl::Status s = kernel.Append(static_cast<int64_t>(queries.size())); !s.ok()) return s;
  const absl::StatusOr<Answer> fp32 = kernel.Decode(queries, kernels::OutType::kFp32);
  if (!fp32.ok()) return fp32.status();
  const absl::StatusOr<Answer> bf16 = kernel.Decode(queries, kernels::OutType::kBf16);
  if (!bf16.ok()) return bf16.status();

  const Fp8Rows k = kernels::reference::quantize_fp8_kv(rows.k, rows.head_dim);
  const Fp8Rows v = kernels::reference::quantize_fp8_kv(rows.v, rows.head_dim);
  const std::vector<double> k_right = Worth(rows, k, 1, false);
  const DecodeOutput right = Reference(rows, queries, k_right, Worth(rows, v, 1, false));
  const Verdict of_fp32 = Judge(*fp32, right, kernels::OutType::kFp32);
  const Verdict of_bf16 = Judge(*bf16, right, kernels::OutType::kBf16);
  const Verdict v_scale =
      Judge(AsAnswer(Reference(rows, queries, k_right, Worth(rows, v, 1.05, false))), right,
            kernels::OutType::kFp32);
  const Verdict one_scale =
      Judge(AsAnswer(Reference(rows, queries, Worth(rows, k, 1, true), Worth(rows, v, 1, true))),
            right, kernels::OutType::kFp32);

  KernelCheck check{.pairs = static_cast<int64_t>(queries.size()) * rows.kv_heads,
                    .rel_l2_fp32 = of_fp32.relative_l2,
                    .rel_l2_bf16 = of_bf16.relative_l2,
                    .worst_element = std::max(of_fp32.worst_element, of_bf16.worst_element),
                    .control_v_scale = v_scale.relative_l2,
                    .control_one_scale = one_scale.relative_l2,
                    .controls_refused = !v_scale.holds && !one_scale.holds,
                    .held = false,
                    .why = of_fp32.why + of_bf16.why};
  if (!check.controls_refused) check.why += "a broken scale passed the judge";
  check.held = of_fp32.holds && of_bf16.holds && check.controls_refused;
  return check;
}

}  // namespace fp8kvd::ctl
