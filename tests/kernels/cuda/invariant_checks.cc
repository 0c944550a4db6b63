#include "tests/kernels/cuda/invariant_checks.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "config/base/geometry.h"
#include "kernels/bf16.h"
#include "tests/kernels/cases.h"

namespace fp8kvd::kernels::cuda {
namespace {

using cases::BackendDevice;

constexpr int32_t kRows = 500;
constexpr int32_t kTokens = 8192;
constexpr int32_t kGroup = 8;

struct Shape {
  Precision precision;
  int32_t head_dim;
  int32_t q_len;

  int64_t RowElements() const { return int64_t{q_len} * kGroup * head_dim; }
};

// Rows of 4,600 tokens and more, all of one sequence.
struct Problem {
  std::vector<DecodeRow> rows;
  std::string error;
};

Problem Make(const Shape& shape, Backend& backend, BackendDevice& device) {
  Problem problem;
  device.Reset();
  constexpr int32_t kPages = kTokens / kPageTokens;
  const int64_t block = backend.BlockBytes(shape.precision, shape.head_dim);
  uint8_t* pool = device.Pool(kPages * block);
  int32_t* table = device.Table(kPages);
  std::vector<int32_t> pages(kPages);
  std::iota(pages.rbegin(), pages.rend(), 0);
  problem.error = device.SetTable(table, pages);

  cases::Random random(9);
  const auto noise = [&](int64_t elements) {
    auto* values = reinterpret_cast<uint16_t*>(device.Staging(elements * 2));
    for (int64_t i = 0; i < elements; ++i) values[i] = FloatToBf16(random.Normal());
    return values;
  };
  const uint16_t* k = noise(int64_t{kTokens} * shape.head_dim);
  const uint16_t* v = noise(int64_t{kTokens} * shape.head_dim);
  const AppendRow append = {k, v, table, pool, block, 0, kTokens, 1};
  if (problem.error.empty())
    problem.error = device.Append({&append, 1, shape.head_dim, shape.precision});
  if (problem.error.empty()) problem.error = device.Wait();

  const uint16_t* q = noise(kRows * shape.RowElements());
  for (int32_t i = 0; i < kRows; ++i) {
    DecodeRow row{};
    row.q = q + i * shape.RowElements();
    row.block_table = table;
    row.base = pool;
    row.page_stride = block;
    row.pos = kTokens - shape.q_len - 7 * i;
    row.q_len = shape.q_len;
    row.kv_heads = 1;
    row.sm_scale = 1.0F / std::sqrt(static_cast<float>(shape.head_dim));
    problem.rows.push_back(row);
  }
  return problem;
}

// Bits of what some of the rows give together, RowElements() of each.
std::string Decode(const std::vector<DecodeRow>& rows, const Shape& shape, BackendDevice& device,
                   std::vector<uint32_t>* bits) {
  const auto count = static_cast<int32_t>(rows.size());
  const int64_t elements = count * shape.RowElements();
  auto* out = reinterpret_cast<float*>(device.Staging(elements * 4));
  std::vector<DecodeRow> placed = rows;
  for (int32_t i = 0; i < count; ++i) placed[i].out = out + i * shape.RowElements();
  std::string error = device.Decode({placed.data(), count, shape.head_dim, kGroup, shape.precision,
                                     OutType::kFp32, /*batch_invariant=*/true});
  if (error.empty()) error = device.Wait();
  for (int64_t i = 0; i < elements; ++i) bits->push_back(std::bit_cast<uint32_t>(out[i]));
  return error;
}

std::string CheckShape(const Shape& shape, Backend& backend, BackendDevice& device) {
  const auto [rows, failed] = Make(shape, backend, device);
  std::vector<uint32_t> all;
  std::string error = failed.empty() ? Decode(rows, shape, device, &all) : failed;
  for (const int32_t few : {1, 3, 60}) {
    for (const int32_t first : {0, 211, kRows - few}) {
      const std::vector<DecodeRow> some(rows.begin() + first, rows.begin() + first + few);
      std::vector<uint32_t> bits;
      if (error.empty()) error = Decode(some, shape, device, &bits);
      if (!error.empty()) return error;
      if (!std::equal(bits.begin(), bits.end(), all.begin() + first * shape.RowElements())) {
        return std::to_string(few) + " rows from " + std::to_string(first) +
               " on have other bits alone, head_dim " + std::to_string(shape.head_dim) +
               ", q_len " + std::to_string(shape.q_len);
      }
    }
  }
  return "";
}

}  // namespace

std::string ItemsOfManyRowsOrOfFew(Backend& backend, BackendDevice& device) {
  for (const Precision precision : {Precision::kFp8Kv, Precision::kBf16}) {
    // 80: half a chunk is folded, too; 4 query tokens: nothing is.
    for (const auto& [head_dim, q_len] : {std::pair(80, 1), {128, 1}, {128, 4}, {256, 1}}) {
      const std::string error = CheckShape({precision, head_dim, q_len}, backend, device);
      if (!error.empty()) return error;
    }
  }
  return "";
}

}  // namespace fp8kvd::kernels::cuda
