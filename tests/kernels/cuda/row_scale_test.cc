// The claim of kernels/cuda/row_scale.h, for every row there is: its scale, and the code of each
// value under it, are those of the division.
#include "kernels/cuda/row_scale.h"

#include <bit>
#include <cstdint>

#include "gtest/gtest.h"

#include "kernels/bf16.h"
#include "kernels/e4m3.h"

namespace fp8kvd::kernels::cuda {
namespace {

constexpr uint32_t kInfinity = 0x7F80;  // bf16; what is below it is finite and not negative
constexpr uint32_t kMantissas = 128;    // of a binade

TEST(RowScale, ScaleIsTheQuotientRoundedOnceForEveryAmax) {
  for (uint32_t bits = 0; bits < kInfinity; ++bits) {
    const float amax = Bf16ToFloat(static_cast<uint16_t>(bits));
    ASSERT_EQ(OverE4m3Max(amax), amax / kE4m3Max) << bits;
  }
}

// How many codes of values up to amax, of either sign, differ from the division's, with a
// reciprocal that is `ulps` off.
int64_t WrongCodes(uint32_t amax_bits, int32_t ulps) {
  const float amax = Bf16ToFloat(static_cast<uint16_t>(amax_bits));
  const float scale = amax / kE4m3Max;
  const float factor = PreFactor(amax);
  const float near = 1.0F / (scale * factor);
  const float y = std::bit_cast<float>(std::bit_cast<uint32_t>(near) + static_cast<uint32_t>(ulps));
  const RowScale row = RowScaleFrom(scale * factor, y);
  // Below 2^-20 of amax, 448 / 2^20, every code is 0.
  const uint32_t span = 20 * kMantissas;
  int64_t wrong = 0;
  const auto is_wrong = [&](float x) {
    return E4m3Encode(Quotient(x * factor, row)) != E4m3Encode(x / scale);
  };
  wrong += is_wrong(0.0F) + is_wrong(-0.0F);
  for (uint32_t bits = amax_bits > span ? amax_bits - span : 1; bits <= amax_bits; ++bits) {
    const float x = Bf16ToFloat(static_cast<uint16_t>(bits));
    wrong += is_wrong(x) + is_wrong(-x);
  }
  return wrong;
}

bool IsTried(uint32_t amax_bits) {
  // All that decides is the digits, but at the ends of the range: 16 binades there, and where the
  // factor changes; four between.
  const uint32_t binade = amax_bits / kMantissas;
  return binade < 16 || binade > 238 || (binade > 64 && binade < 70) ||
         (binade > 184 && binade < 190) || (binade > 125 && binade < 130);
}

TEST(RowScale, EveryCodeIsThatOfTheDivision) {
  for (uint32_t bits = 1; bits < kInfinity; ++bits) {
    if (!IsTried(bits)) continue;
    for (const int32_t ulps : {-3, -2, -1}) {
      ASSERT_EQ(WrongCodes(bits, ulps), 0) << "amax " << bits << ", reciprocal off by " << ulps;
    }
  }
}

// That the test above can fail: one product with the rounded reciprocal is not enough.
TEST(RowScale, AProductWithTheReciprocalAloneIsWrongSomewhere) {
  int64_t wrong = 0;
  for (uint32_t m = 0; m < kMantissas; ++m) {
    const float amax = Bf16ToFloat(static_cast<uint16_t>(127 * kMantissas + m));
    const float scale = amax / kE4m3Max;
    for (uint32_t bits = 126 * kMantissas; bits <= 127 * kMantissas + m; ++bits) {
      const float x = Bf16ToFloat(static_cast<uint16_t>(bits));
      if (E4m3Encode(x * (1.0F / scale)) != E4m3Encode(x / scale)) ++wrong;
    }
  }
  EXPECT_GT(wrong, 0);
}

}  // namespace
}  // namespace fp8kvd::kernels::cuda
