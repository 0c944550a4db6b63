#include <algorithm>
#include <cstring>
#include <iterator>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/bf16.h"
#include "kernels/cpu/range.h"
#include "tests/kernels/cpu_targets.h"

namespace fp8kvd::kernels::cpu {
namespace {

constexpr uint16_t kLargestAllowed = 0x4D7F;   // the bf16 before 2^28
constexpr uint16_t kSmallestRefused = 0x4D80;  // 2^28

class CpuRange : public OnEachTarget {};

TEST_P(CpuRange, TheLimitIsTwoToThe28th) {
  ASSERT_EQ(Bf16ToFloat(kSmallestRefused), 0x1p28F);
  for (const uint16_t sign : {0x0000, 0x8000}) {
    const std::vector<uint16_t> allowed(100, kLargestAllowed | sign);
    EXPECT_EQ(FirstOutOfRange(allowed.data(), 100), -1);
    const std::vector<uint16_t> refused(100, kSmallestRefused | sign);
    EXPECT_EQ(FirstOutOfRange(refused.data(), 100), 0);
  }
}

TEST_P(CpuRange, EveryBf16IsRefusedExactlyWhenItIsNotFiniteOrTooLarge) {
  for (uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const auto value = static_cast<uint16_t>(bits);
    const bool allowed = std::abs(Bf16ToFloat(value)) < 0x1p28F;  // false for NaN
    ASSERT_EQ(FirstOutOfRange(&value, 1), allowed ? -1 : 0) << bits;
  }
}

TEST_P(CpuRange, TheFirstOffenderIsFoundAtEveryPlaceOfEveryLength) {
  for (int64_t count = 0; count <= 300; count += count < 140 ? 1 : 13) {
    std::vector<uint16_t> values(count, kLargestAllowed);
    EXPECT_EQ(FirstOutOfRange(values.data(), count), -1);
    for (int64_t at = 0; at < count; ++at) {
      values.assign(count, kLargestAllowed);
      values[at] = 0x7FC0;     // NaN
      values.back() = 0xFF80;  // a later one is not named
      ASSERT_EQ(FirstOutOfRange(values.data(), count), at);
    }
  }
}

// From a place of its own to the beginning of a line of the caches and to its half, ending at
// either; with a copy kept and without.
TEST_P(CpuRange, ACopyPastTheCachesIsWholeAndNamesTheFirstOffender) {
  constexpr int64_t kCountMax = 320;
  alignas(64) uint16_t to[kCountMax + 48];
  alignas(64) uint16_t kept[kCountMax];
  for (const int64_t begin : {16, 32}) {
    for (const int64_t count : {int64_t{16}, kCountMax - 16, kCountMax}) {
      for (int64_t at = -1; at < count; ++at) {
        std::vector<uint16_t> values(count, kLargestAllowed);
        if (at >= 0) values[at] = 0x7FC0;  // NaN
        values.back() = at < 0 ? 0xCD7F : 0xFF80;
        std::vector<uint8_t> from(1 + count * 2);
        std::memcpy(from.data() + 1, values.data(), count * 2);
        std::fill(std::begin(to), std::end(to), uint16_t{1});
        uint16_t* const beside = at % 2 == 0 ? kept : nullptr;
        ASSERT_EQ(CopyPastCaches(from.data() + 1, to + begin, beside, count), at);
        FinishCopies();
        EXPECT_TRUE(std::equal(values.begin(), values.end(), to + begin)) << at;
        if (beside != nullptr) {
          EXPECT_TRUE(std::equal(values.begin(), values.end(), kept)) << at;
        }
        EXPECT_EQ(std::count(to, to + begin, 1), begin);
        EXPECT_EQ(std::count(to + begin + count, std::end(to), 1), kCountMax + 48 - begin - count);
      }
    }
  }
  EXPECT_EQ(CopyPastCaches(nullptr, to + 16, nullptr, 0), -1);
}

TEST_P(CpuRange, ACopyIsWholeAndNamesTheFirstOffender) {
  for (int64_t count = 0; count <= 300; count += count < 70 ? 1 : 23) {
    for (int64_t at = -1; at < count; ++at) {
      std::vector<uint16_t> values(count + 1, kLargestAllowed);
      if (at >= 0) values[at + 1] = 0x7FC0;  // NaN
      values.back() = at < 0 ? 0xCD7F : 0xFF80;
      std::vector<uint16_t> to(count + 2, 1);
      ASSERT_EQ(CopyInRange(values.data() + 1, to.data() + 1, count), at);
      EXPECT_TRUE(std::equal(values.begin() + 1, values.end(), to.begin() + 1));
      EXPECT_EQ(to.front(), 1);
      EXPECT_EQ(to.back(), 1);
    }
  }
}

FP8KVD_ON_EACH_TARGET(CpuRange);

}  // namespace
}  // namespace fp8kvd::kernels::cpu
