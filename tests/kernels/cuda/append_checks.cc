#include "tests/kernels/cuda/append_checks.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "config/base/limits.h"
#include "kernels/bf16.h"
#include "kernels/cuda/page_layout.h"
#include "kernels/reference/append.h"
#include "tests/kernels/cases.h"

namespace fp8kvd::kernels::cuda {
namespace {

using cases::BackendDevice;
using cases::Random;

uint32_t Bits(float x) { return std::bit_cast<uint32_t>(x); }

// One block of the cache as a test reads it.
template <Precision kPrecision>
struct BlockView {
  const uint8_t* block;
  int32_t head_dim;

  const uint8_t* Tile(int32_t token) const {
    return block + token / kTileTokens * TileBytes(kPrecision, head_dim);
  }
  // The code or the bf16 of one element.
  uint32_t Element(bool is_key, int32_t token, int32_t dim) const {
    const int32_t t = token % kTileTokens;
    const int32_t place =
        is_key ? KPlace<kPrecision>(head_dim, t, dim) : VPlace<kPrecision>(head_dim, t, dim);
    const int32_t start = is_key ? 0 : TileOperandBytes(kPrecision, head_dim);
    const uint8_t* element = Tile(token) + start + place;
    if (kPrecision == Precision::kFp8Kv) return *element;
    uint16_t bits = 0;
    std::memcpy(&bits, element, sizeof(bits));
    return bits;
  }
  float Scale(bool is_key, int32_t token) const {
    float scale = 0.0F;
    const int32_t start = is_key ? TileKScales(head_dim) : TileVScales(head_dim);
    std::memcpy(&scale, Tile(token) + start + 4 * (token % kTileTokens), sizeof(scale));
    return scale;
  }
};

// Tokens that are appended in slices: at odd places, whole tiles and across pages.
struct AppendCase {
  int32_t head_dim;
  int32_t kv_heads;
  std::vector<int32_t> slices;  // lengths, from position 3 on
  bool with_decodes;            // each slice is a token, and a decode follows it
  int32_t row_tokens;           // 0: a slice is a row; else rows of so many, brought first
};
constexpr int32_t kAppendFirst = 3;

template <Precision kPrecision>
std::string CompareBlock(const BlockView<kPrecision>& view, bool is_key, int32_t token,
                         const uint16_t* row) {
  std::vector<uint8_t> codes(view.head_dim);
  float scale = 0.0F;
  reference::QuantizeRow(row, view.head_dim, codes.data(), &scale);
  const std::string at = (is_key ? "K of token " : "V of token ") + std::to_string(token);
  for (int32_t dim = 0; dim < view.head_dim; ++dim) {
    const uint32_t want = kPrecision == Precision::kFp8Kv ? codes[dim] : row[dim];
    const uint32_t got = view.Element(is_key, token % kPageTokens, dim);
    if (got != want) {
      return at + ", dimension " + std::to_string(dim) + ": " + std::to_string(got) +
             ", the reference has " + std::to_string(want);
    }
  }
  if (kPrecision == Precision::kBf16) return "";
  const float got = view.Scale(is_key, token % kPageTokens);
  return Bits(got) == Bits(scale) ? "" : at + ": scale differs";
}

// Rows that make every kind of code: ordinary, subnormal codes, zero, subnormal and huge values.
void FillAppendRow(Random& random, int64_t kind, int32_t head_dim, uint16_t* row) {
  for (int32_t i = 0; i < head_dim; ++i) {
    float factor = 1.0F;
    if (kind % 7 == 1) factor = i == 5 ? 400.0F : 0x1p-4F;
    if (kind % 7 == 2) factor = 0.0F;
    if (kind % 7 == 3) factor = 0x1p-130F;
    if (kind % 7 == 4) factor = 0x1p26F;
    if (kind % 7 == 5) factor = i % 2 == 0 ? 1.0F : 0x1p-12F;
    row[i] = FloatToBf16(random.Normal() * factor);
  }
}

// One query at the one token that was appended.
std::string DecodeAfter(BackendDevice& device, const AppendRow& appended, int32_t head_dim,
                        Precision precision, uint8_t* out) {
  DecodeRow row{};
  row.q = appended.k;
  row.out = out;
  row.block_table = appended.block_table;
  row.base = appended.base;
  row.page_stride = appended.page_stride;
  row.pos = appended.pos;
  row.q_len = 1;
  row.kv_heads = appended.kv_heads;
  row.window = appended.pos - kAppendFirst + 1;
  row.sm_scale = 0.1F;
  std::string error = device.Decode({&row, 1, head_dim, 1, precision, OutType::kBf16, false});
  // synccheck loses track of more launches than these at once.
  if (error.empty() && appended.pos % 16 == 0) error = device.Wait();
  return error;
}

// The slice in rows, which the device brings if it finds that worth it. Then nothing may be read
// from the host any more.
std::string AppendBrought(Backend& backend, BackendDevice& device, const AppendCase& c,
                          const AppendRow& slice, Precision precision) {
  const int64_t row_elements = int64_t{c.kv_heads} * c.head_dim;
  std::vector<AppendRow> rows;
  for (int32_t first = 0; first < slice.n; first += c.row_tokens) {
    AppendRow row = slice;
    row.k += first * row_elements;
    row.v += first * row_elements;
    row.pos += first;
    row.n = std::min(c.row_tokens, slice.n - first);
    rows.push_back(row);
  }
  AppendParams params = {rows.data(), static_cast<int32_t>(rows.size()), c.head_dim, precision};
  const absl::StatusOr<std::optional<BringId>> bring = backend.Bring(params);
  if (!bring.ok()) return bring.status().ToString();
  if (!bring->has_value()) return device.Append(params);
  absl::StatusOr<bool> brought = false;
  while (brought.ok() && !*brought) brought = backend.Brought(**bring);
  if (!brought.ok()) return brought.status().ToString();
  const auto spoil = [&](const uint16_t* values) {
    const std::vector<uint16_t> before(values, values + slice.n * row_elements);
    std::fill_n(const_cast<uint16_t*>(values), before.size(), uint16_t{0xFFFF});
    return before;
  };
  const std::vector<uint16_t> k = spoil(slice.k);
  const std::vector<uint16_t> v = spoil(slice.v);
  params.is_brought = true;
  std::string error = device.Append(params);
  if (error.empty()) error = device.Wait();
  std::copy(k.begin(), k.end(), const_cast<uint16_t*>(slice.k));
  std::copy(v.begin(), v.end(), const_cast<uint16_t*>(slice.v));
  return error;
}

template <Precision kPrecision>
std::string CheckAppend(Backend& backend, BackendDevice& device, const AppendCase& c) {
  device.Reset();
  int32_t tokens = 0;
  for (const int32_t n : c.slices) tokens += n;
  const int32_t end = kAppendFirst + tokens;
  const int32_t pages = (end + kPageTokens - 1) / kPageTokens;
  const int64_t block = BlockBytesOf(kPrecision, c.head_dim);
  const int64_t stride = block * c.kv_heads;
  uint8_t* pool = device.Pool(pages * stride);
  std::string error = device.Poison(pool, pages * stride);
  int32_t* table = device.Table(pages);
  std::vector<int32_t> page_ids(pages);
  for (int32_t i = 0; i < pages; ++i) page_ids[i] = pages - 1 - i;
  if (error.empty()) error = device.SetTable(table, page_ids);

  const int64_t row_elements = int64_t{c.kv_heads} * c.head_dim;
  const int64_t elements = tokens * row_elements;
  auto* k = reinterpret_cast<uint16_t*>(device.Staging(elements * 2));
  auto* v = reinterpret_cast<uint16_t*>(device.Staging(elements * 2));
  Random random(c.head_dim);
  for (int64_t i = 0; i < int64_t{tokens} * c.kv_heads; ++i) {
    FillAppendRow(random, i, c.head_dim, k + i * c.head_dim);
    FillAppendRow(random, i + 3, c.head_dim, v + i * c.head_dim);
  }
  uint8_t* out = device.Staging(row_elements * 2);
  int32_t done = 0;
  for (const int32_t n : c.slices) {
    const AppendRow row = {k + done * row_elements,
                           v + done * row_elements,
                           table,
                           pool,
                           stride,
                           kAppendFirst + done,
                           n,
                           c.kv_heads};
    if (error.empty() && c.row_tokens == 0) {
      error = device.Append({&row, 1, c.head_dim, kPrecision});
    } else if (error.empty()) {
      error = AppendBrought(backend, device, c, row, kPrecision);
    }
    done += n;
    if (error.empty() && c.with_decodes)
      error = DecodeAfter(device, row, c.head_dim, kPrecision, out);
  }
  std::vector<uint8_t> bytes(pages * stride);
  if (error.empty() && !backend.Read(pool, absl::MakeSpan(bytes)).ok()) error = "reading failed";
  for (int32_t token = kAppendFirst; error.empty() && token < end; ++token) {
    for (int32_t head = 0; error.empty() && head < c.kv_heads; ++head) {
      const int64_t page = page_ids[token / kPageTokens];
      const BlockView<kPrecision> view = {bytes.data() + page * stride + head * block, c.head_dim};
      const int64_t at = ((token - kAppendFirst) * int64_t{c.kv_heads} + head) * c.head_dim;
      error = CompareBlock(view, true, token, k + at);
      if (error.empty()) error = CompareBlock(view, false, token, v + at);
    }
  }
  // What was not appended is as it was.
  const BlockView<kPrecision> first = {bytes.data() + page_ids[0] * stride, c.head_dim};
  const uint32_t poison = kPrecision == Precision::kFp8Kv ? 0xFFU : 0xFFFFU;
  for (int32_t dim = 0; error.empty() && dim < c.head_dim; ++dim) {
    if (first.Element(true, kAppendFirst - 1, dim) != poison ||
        first.Element(false, kAppendFirst - 1, dim) != poison) {
      error = "a token before the appended ones changed";
    }
  }
  return error;
}

}  // namespace

std::string AppendEqualsTheReference(Backend& backend, BackendDevice& device) {
  for (const int32_t head_dim : kHeadDims) {
    for (const bool with_decodes : {false, true}) {
      AppendCase c = {head_dim, 3, {1, 1, 7, 4, 16, 33, 1, 80, 15}, with_decodes, 0};
      if (with_decodes) c.slices.assign(70, 1);
      std::string error = CheckAppend<Precision::kFp8Kv>(backend, device, c);
      if (error.empty()) error = CheckAppend<Precision::kBf16>(backend, device, c);
      if (!error.empty()) {
        return "d" + std::to_string(head_dim) + (with_decodes ? " by steps: " : ": ") + error;
      }
    }
  }
  return "";
}

// As many bytes as are worth bringing, as a few rows and as many; and few bytes.
std::string BroughtRowsAreAppended(Backend& backend, BackendDevice& device) {
  for (const int32_t head_dim : {80, 128}) {
    for (const int32_t row_tokens : {1000, 10}) {
      const AppendCase c = {head_dim, 8, {30, 300, 5}, /*with_decodes=*/false, row_tokens};
      std::string error = CheckAppend<Precision::kFp8Kv>(backend, device, c);
      if (error.empty()) error = CheckAppend<Precision::kBf16>(backend, device, c);
      if (!error.empty()) return "d" + std::to_string(head_dim) + ": " + error;
    }
  }
  return "";
}

// Rows that between them have every amax of a binade and, under it, every value that has a code.
std::string EveryCodeOfEveryScale(Backend& backend, BackendDevice& device) {
  constexpr int32_t kDim = 128;
  constexpr int32_t kMantissas = 128;
  constexpr int32_t kBinades = 20;  // below amax; 448 / 2^20 has code 0
  for (const int32_t binade : {0, 1, 66, 127, 154, 188, 254}) {  // bf16 exponents
    device.Reset();
    const int32_t tokens = kMantissas * kBinades;
    auto* k = reinterpret_cast<uint16_t*>(device.Staging(int64_t{tokens} * kDim * 2));
    for (int32_t token = 0; token < tokens; ++token) {
      const int32_t amax = std::max(binade * kMantissas + token % kMantissas, 1);
      const int32_t below = token / kMantissas;  // this binade's values, but amax itself
      for (int32_t i = 0; i < kDim; ++i) {
        const int32_t value = std::max((binade - below) * kMantissas + i, 0);
        const int32_t sign = i % 3 == 0 ? 0x8000 : 0;
        k[token * kDim + i] = static_cast<uint16_t>(std::min(value, amax) | sign);
      }
      k[token * kDim + token % kDim] = static_cast<uint16_t>(amax);
    }
    const int32_t pages = tokens / kPageTokens;
    const int64_t stride = BlockBytesOf(Precision::kFp8Kv, kDim);
    uint8_t* pool = device.Pool(pages * stride);
    int32_t* table = device.Table(pages);
    std::vector<int32_t> page_ids(pages);
    std::iota(page_ids.begin(), page_ids.end(), 0);
    std::string error = device.SetTable(table, page_ids);
    const AppendRow row = {k, k, table, pool, stride, 0, tokens, 1};
    if (error.empty()) error = device.Append({&row, 1, kDim, Precision::kFp8Kv});
    std::vector<uint8_t> bytes(pages * stride);
    if (error.empty() && !backend.Read(pool, absl::MakeSpan(bytes)).ok()) error = "reading failed";
    for (int32_t token = 0; error.empty() && token < tokens; ++token) {
      const BlockView<Precision::kFp8Kv> view = {bytes.data() + token / kPageTokens * stride, kDim};
      error = CompareBlock(view, true, token, k + token * kDim);
      if (error.empty()) error = CompareBlock(view, false, token, k + token * kDim);
    }
    if (!error.empty()) return "exponent " + std::to_string(binade) + ": " + error;
  }
  return "";
}

std::string CopiedPagesAreEqual(Backend& backend, BackendDevice& device) {
  device.Reset();
  constexpr int64_t kPage = 3 * 16896;
  uint8_t* pool = device.Pool(10 * kPage);
  std::vector<uint8_t> bytes(10 * kPage);
  Random random(1);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.Next());
  if (!backend.Write(pool, bytes).ok()) return "writing failed";
  const std::vector<PageCopy> copies = {{pool + 7 * kPage, pool, kPage},
                                        {pool + 8 * kPage, pool + 3 * kPage, kPage}};
  if (!backend.CopyPages(copies).ok()) return "copying failed";
  std::vector<uint8_t> after(bytes.size());
  if (!backend.Read(pool, absl::MakeSpan(after)).ok()) return "reading failed";
  std::memcpy(bytes.data() + 7 * kPage, bytes.data(), kPage);
  std::memcpy(bytes.data() + 8 * kPage, bytes.data() + 3 * kPage, kPage);
  return after == bytes ? "" : "pages differ";
}

}  // namespace fp8kvd::kernels::cuda
