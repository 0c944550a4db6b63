// The scalar definition of e4m3 against the definition in words: value = (-1)^s 2^(e - 7) (1 + m /
// 8), 2^-6 m / 8 where e = 0; a number rounds to the nearest code, at a tie to the even one.
#include "kernels/e4m3.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include <gtest/gtest.h>

namespace fp8kvd::kernels {
namespace {

double ValueByDefinition(int code) {
  const int exponent = (code >> 3) & 15;
  const int mantissa = code & 7;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa / 8.0, -6)
                                         : std::ldexp(1.0 + mantissa / 8.0, exponent - 7);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

bool IsNanCode(int code) { return (code & 0x7F) == 0x7F; }

TEST(E4m3, EveryCodeHasTheValueOfTheDefinition) {
  for (int code = 0; code < 256; ++code) {
    const float value = E4m3Value(static_cast<uint8_t>(code));
    if (IsNanCode(code)) {
      EXPECT_TRUE(std::isnan(value)) << code;
    } else {
      EXPECT_EQ(value, ValueByDefinition(code)) << code;
      EXPECT_EQ(std::signbit(value), code >= 128) << code;
    }
  }
}

TEST(E4m3, EveryCodeIsTheCodeOfItsOwnValue) {
  for (int code = 0; code < 256; ++code) {
    if (IsNanCode(code)) continue;
    EXPECT_EQ(E4m3Encode(E4m3Value(static_cast<uint8_t>(code))), code);
  }
}

TEST(E4m3, BetweenTwoCodesTheNearerIsTakenAndAtATieTheEvenOne) {
  for (int code = 0; code < kE4m3Largest; ++code) {
    const float low = E4m3Value(static_cast<uint8_t>(code));
    const float high = E4m3Value(static_cast<uint8_t>(code + 1));
    const float tie = (low + high) / 2;  // exact
    const int even = code % 2 == 0 ? code : code + 1;
    EXPECT_EQ(E4m3Encode(tie), even);
    EXPECT_EQ(E4m3Encode(std::nextafter(tie, low)), code);
    EXPECT_EQ(E4m3Encode(std::nextafter(tie, high)), code + 1);
    EXPECT_EQ(E4m3Encode(-tie), even | 0x80);
    EXPECT_EQ(E4m3Encode(-std::nextafter(tie, high)), (code + 1) | 0x80);
  }
}

TEST(E4m3, BeyondTheLargestItSaturates) {
  for (const float value :
       {448.0F, 449.0F, 464.0F, 480.0F, 1e30F, std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(E4m3Encode(value), kE4m3Largest);
    EXPECT_EQ(E4m3Encode(-value), kE4m3Largest | 0x80);
  }
}

TEST(E4m3, BelowHalfOfTheSmallestItIsASignedZero) {
  for (const float value : {0.0F, 0x1p-10F, 0x1p-149F, 0x1p-126F}) {
    EXPECT_EQ(E4m3Encode(value), 0);
    EXPECT_EQ(E4m3Encode(-value), 0x80);
  }
}

TEST(E4m3, NanStaysNan) {
  EXPECT_EQ(E4m3Encode(std::numeric_limits<float>::quiet_NaN()) & 0x7F, kE4m3Nan);
}

// Every fp32 whose low bits are one of a few patterns, against a search of the nearest code.
TEST(E4m3, AWideSweepOfNumbersAgreesWithASearchForTheNearestCode) {
  for (uint32_t high = 0; high < 0x7F80; ++high) {
    for (const uint32_t low : {0x0000U, 0x0001U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU}) {
      const float value = std::bit_cast<float>((high << 16) | low);
      int nearest = 0;
      for (int code = 1; code <= kE4m3Largest; ++code) {
        const double off = std::fabs(ValueByDefinition(code) - static_cast<double>(value));
        const double best = std::fabs(ValueByDefinition(nearest) - static_cast<double>(value));
        if (off < best || (off == best && code % 2 == 0)) nearest = code;
      }
      ASSERT_EQ(E4m3Encode(value), nearest) << value;
    }
  }
}

// An f16 of 5 exponent bits (bias 15) and 10 mantissa bits, finite.
double F16ByDefinition(uint32_t bits) {
  const auto exponent = static_cast<int>((bits >> 10) & 31);
  const int mantissa = static_cast<int>(bits & 0x3FFU);
  const double magnitude = exponent == 0 ? std::ldexp(mantissa / 1024.0, -14)
                                         : std::ldexp(1.0 + mantissa / 1024.0, exponent - 15);
  return (bits & 0x8000U) != 0 ? -magnitude : magnitude;
}

TEST(E4m3, MovedBitsAreAnF16OfEveryCode) {
  for (uint32_t code = 0; code < 256; ++code) {
    if (IsNanCode(static_cast<int>(code))) continue;
    const double expected =
        std::ldexp(ValueByDefinition(static_cast<int>(code)), -kE4m3InF16Exponent);
    const uint32_t other = 0x5AU;  // neither half touches the other, nor does what is below a code
    const uint32_t low = E4m3PairInF16(other << 24 | 0xFFU << 16 | code << 8 | 0xFFU);
    const uint32_t high = E4m3PairInF16(code << 24 | 0xFFU << 16 | other << 8 | 0xFFU);
    EXPECT_EQ(F16ByDefinition(low & 0xFFFFU), expected) << code;
    EXPECT_EQ(F16ByDefinition(high >> 16), expected) << code;
  }
}

}  // namespace
}  // namespace fp8kvd::kernels
