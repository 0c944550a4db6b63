// The CPU's append: codes and scales equal the scalar reference bit for bit, at the places that
// page_layout.h names and nowhere else.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "config/base/limits.h"
#include "kernels/bf16.h"
#include "kernels/cpu/append.h"
#include "kernels/cpu/float_mode.h"
#include "kernels/cpu/page_layout.h"
#include "kernels/e4m3.h"
#include "kernels/reference/append.h"
#include "server/engine/worker_pool.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/cpu_targets.h"

namespace fp8kvd::kernels::cpu {
namespace {

// Appends rows [tokens, kv_heads, head_dim] as K, and the same backwards as V, into poisoned
// blocks.
class Appended {
 public:
  Appended(Precision precision, const std::vector<uint16_t>& rows, int32_t kv_heads,
           int32_t head_dim, int32_t pos, int32_t threads)
      : layout_{precision, head_dim},
        kv_heads_(kv_heads),
        pos_(pos),
        k_(rows),
        v_(rows.rbegin(), rows.rend()) {
    tokens_ = static_cast<int32_t>(rows.size()) / (kv_heads * head_dim);
    const int32_t pages = (pos + tokens_ + kPageTokens - 1) / kPageTokens;
    for (int32_t i = 0; i < pages; ++i) table_.push_back(pages - 1 - i);
    bytes_.assign(pages * PageStride(), 0xFF);
    engine::WorkerPool workers(threads);
    const AppendRow row{k_.data(),    v_.data(), table_.data(), bytes_.data(),
                        PageStride(), pos_,      tokens_,       kv_heads_};
    Append({&row, 1, head_dim, precision}, workers);
  }

  int32_t tokens() const { return tokens_; }

  // Empty when each code and scale (or bf16) of K and V is the reference's; else the first that is
  // not.
  std::string Compare() const {
    for (int32_t token = 0; token < tokens_; ++token) {
      for (int32_t kv_head = 0; kv_head < kv_heads_; ++kv_head) {
        const int64_t at = (int64_t{token} * kv_heads_ + kv_head) * layout_.head_dim;
        const std::string where =
            "token " + std::to_string(token) + " kv_head " + std::to_string(kv_head) + ": ";
        for (const bool is_key : {true, false}) {
          const std::string error = CompareRow(is_key, Block(token, kv_head), token, at);
          if (!error.empty()) return where + (is_key ? "k " : "v ") + error;
        }
      }
    }
    return "";
  }

  // Bytes that are no longer poison.
  int64_t BytesWritten() const {
    int64_t written = 0;
    for (const uint8_t byte : bytes_) written += byte != 0xFF ? 1 : 0;
    return written;
  }

 private:
  int64_t PageStride() const { return layout_.block_bytes() * kv_heads_; }
  const uint8_t* Block(int32_t token, int32_t kv_head) const {
    return bytes_.data() + table_[(pos_ + token) / kPageTokens] * PageStride() +
           kv_head * layout_.block_bytes();
  }

  std::string CompareRow(bool is_key, const uint8_t* block, int32_t token, int64_t at) const {
    const uint16_t* row = (is_key ? k_ : v_).data() + at;
    const int32_t slot = (pos_ + token) % kPageTokens;
    uint8_t codes[kHeadDimMax];
    float scale = 0.0F;
    reference::QuantizeRow(row, layout_.head_dim, codes, &scale);
    for (int32_t dim = 0; dim < layout_.head_dim; ++dim) {
      const uint8_t* got = block + (is_key ? layout_.K(slot, dim) : layout_.V(slot, dim));
      const bool same = layout_.precision == Precision::kFp8Kv
                            ? *got == codes[dim]
                            : std::memcmp(got, row + dim, sizeof(uint16_t)) == 0;
      if (!same) {
        return "dim " + std::to_string(dim) + ": code " + std::to_string(*got) + ", right is " +
               std::to_string(codes[dim]) + " for " + std::to_string(Bf16ToFloat(row[dim])) +
               " at scale " + std::to_string(scale);
      }
    }
    if (layout_.precision == Precision::kBf16) return "";
    float got = 0.0F;
    std::memcpy(&got, block + (is_key ? layout_.k_scale(slot) : layout_.v_scale(slot)),
                sizeof(got));
    return std::bit_cast<uint32_t>(got) == std::bit_cast<uint32_t>(scale) ? "" : "scale";
  }

  const PageLayout layout_;
  const int32_t kv_heads_;
  const int32_t pos_;
  int32_t tokens_ = 0;
  const std::vector<uint16_t> k_;
  const std::vector<uint16_t> v_;
  std::vector<int32_t> table_;
  std::vector<uint8_t> bytes_;
};

std::string CompareFp8(const std::vector<uint16_t>& rows, int32_t head_dim) {
  return Appended(Precision::kFp8Kv, rows, 1, head_dim, 0, 1).Compare();
}

// Rows of 64 whose largest element is `largest`, so that the scale is largest / 448.
std::vector<uint16_t> RowsWithLargest(uint16_t largest, const std::vector<uint16_t>& elements) {
  std::vector<uint16_t> rows;
  for (const uint16_t element : elements) {
    if (rows.size() % 64 == 0) rows.push_back(largest);
    rows.push_back(element);
  }
  while (rows.size() % 64 != 0) rows.push_back(0);
  return rows;
}

class CpuAppend : public OnEachTarget {};

TEST_P(CpuAppend, EveryCodeEveryTieAndTheirNeighboursEqualTheReference) {
  for (const float unit : {1.0F, 0x1p-20F, 0x1p90F, 0x1p-130F}) {
    std::vector<uint16_t> elements;
    for (int32_t code = 0; code < kE4m3Largest; ++code) {
      const float low = E4m3Value(static_cast<uint8_t>(code));
      const float high = E4m3Value(static_cast<uint8_t>(code + 1));
      for (const float value : {low, high, (low + high) / 2}) {
        const uint16_t bits = FloatToBf16(value * unit);
        for (const int32_t step : {-1, 0, 1}) {
          const auto near = static_cast<uint16_t>(bits + step);
          if (near <= 0x7F80 && Bf16ToFloat(near) <= 448.0F * unit) elements.push_back(near);
          if (near <= 0x7F80 && Bf16ToFloat(near) <= 448.0F * unit)
            elements.push_back(near | 0x8000);
        }
      }
    }
    EXPECT_EQ(CompareFp8(RowsWithLargest(FloatToBf16(448.0F * unit), elements), 64), "") << unit;
  }
}

TEST_P(CpuAppend, EveryFiniteBf16UnderManyScalesEqualsTheReference) {
  for (const uint16_t largest :
       {0x7F7F, 0x7F00, 0x4D7F, 0x43E0, 0x3F80, 0x3FAB, 0x0080, 0x007F, 0x0013, 0x0001}) {
    std::vector<uint16_t> elements;
    for (uint32_t bits = 0; bits <= largest; ++bits) {
      elements.push_back(static_cast<uint16_t>(bits));
      elements.push_back(static_cast<uint16_t>(bits | 0x8000));
    }
    EXPECT_EQ(CompareFp8(RowsWithLargest(largest, elements), 64), "") << largest;
  }
}

TEST_P(CpuAppend, ZeroRowsHaveScaleZeroAndCodesZero) {
  std::vector<uint16_t> rows(4 * 64, 0x0000);
  for (size_t i = 0; i < 64; ++i) rows[i] = 0x8000;
  EXPECT_EQ(CompareFp8(rows, 64), "");
}

TEST_P(CpuAppend, RandomRowsOfEveryShapeLandAtTheirPlaces) {
  cases::Random random(11);
  for (const Precision precision : {Precision::kFp8Kv, Precision::kBf16}) {
    for (const int32_t head_dim : kHeadDims) {
      std::vector<uint16_t> rows(130 * 3 * head_dim);
      for (size_t i = 0; i < rows.size(); ++i) {
        const float magnitude = std::exp2(static_cast<float>(i / head_dim % 40) - 20.0F);
        rows[i] = FloatToBf16(random.Normal() * magnitude);
      }
      for (const int32_t threads : {1, 3}) {
        const Appended appended(precision, rows, 3, head_dim, /*pos=*/37, threads);
        EXPECT_EQ(appended.Compare(), "") << head_dim;
      }
    }
  }
}

TEST_P(CpuAppend, ASubnormalScaleSurvivesACallerThatFlushesSubnormals) {
  const FloatMode mode(Subnormals::kFlush);
  volatile float subnormal = 0x1p-130F;
  std::vector<uint16_t> rows(64, 0x0001);
  rows[0] = 0x007F;
  const Appended appended(Precision::kFp8Kv, rows, 1, 64, 0, 1);
  EXPECT_EQ(subnormal * 1.0F, 0.0F) << "the caller's mode was not restored";
  const FloatMode exact(Subnormals::kKeep);
  EXPECT_EQ(appended.Compare(), "");
}

FP8KVD_ON_EACH_TARGET(CpuAppend);

TEST(CpuAppendPlaces, OneTokenWritesItsOwnElementsAndScalesAlone) {
  const std::vector<uint16_t> rows(96, FloatToBf16(1.0F));
  const Appended fp8(Precision::kFp8Kv, rows, 1, 96, /*pos=*/70, 1);
  EXPECT_EQ(fp8.BytesWritten(), 2 * 96 + 2 * 4);
  const Appended bf16(Precision::kBf16, rows, 1, 96, /*pos=*/70, 1);
  EXPECT_EQ(bf16.BytesWritten(), 2 * 96 * 2);
}

TEST(PageLayout, NoTwoElementsOrScalesShareAByteAndAllAreInsideTheBlock) {
  for (const Precision precision : {Precision::kFp8Kv, Precision::kBf16}) {
    for (const int32_t head_dim : kHeadDims) {
      const PageLayout layout{precision, head_dim};
      std::vector<int> users(layout.block_bytes(), 0);
      const auto use = [&](int64_t at, int64_t bytes) {
        for (int64_t i = at; i < at + bytes; ++i) ++users.at(i);
      };
      for (int32_t token = 0; token < kPageTokens; ++token) {
        for (int32_t dim = 0; dim < head_dim; ++dim) {
          use(layout.K(token, dim), layout.element_bytes());
          use(layout.V(token, dim), layout.element_bytes());
        }
        if (precision == Precision::kFp8Kv) {
          use(layout.k_scale(token), sizeof(float));
          use(layout.v_scale(token), sizeof(float));
        }
      }
      EXPECT_EQ(users, std::vector<int>(users.size(), 1)) << head_dim;
      EXPECT_EQ(layout.block_bytes(), KvBytesPerToken(precision, head_dim) * kPageTokens);
    }
  }
}

}  // namespace
}  // namespace fp8kvd::kernels::cpu
