// The oracle against cases that are known without it, and the tests of the test.
#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "config/base/limits.h"
#include "kernels/bf16.h"
#include "kernels/e4m3.h"
#include "kernels/reference/append.h"
#include "kernels/reference/decode.h"
#include "kernels/reference/format.h"
#include "tests/kernels/bf16_values.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/run_case.h"

namespace fp8kvd::kernels::reference {
namespace {

TEST(Bf16, RoundsToNearestEven) {
  EXPECT_EQ(FloatToBf16(1.0F), 0x3F80);
  EXPECT_EQ(FloatToBf16(1.0F + 0x1p-8F), 0x3F80);            // a tie, to the even one
  EXPECT_EQ(FloatToBf16(1.0F + 0x1p-7F + 0x1p-8F), 0x3F82);  // a tie, to the even one
  EXPECT_EQ(FloatToBf16(1.0F + 0x1p-8F + 0x1p-20F), 0x3F81);
  EXPECT_EQ(FloatToBf16(-std::numeric_limits<float>::infinity()), 0xFF80);
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(std::numeric_limits<float>::quiet_NaN()))));
}

TEST(Quantize, TheLargestElementGetsTheLargestCode) {
  const Fp8Rows rows = quantize_fp8_kv(Bf16({1.0F, -3.5F, 0.0F, 1.75F}), 4);
  EXPECT_EQ(rows.scales[0], 3.5F / 448.0F);
  EXPECT_EQ(rows.codes, (std::vector<uint8_t>{E4m3Encode(128.0F), 0xFE, 0x00, E4m3Encode(224.0F)}));
}

TEST(Quantize, AZeroRowHasScaleZeroAndCodesZero) {
  const Fp8Rows rows = quantize_fp8_kv(Bf16({0.0F, -0.0F, 0.0F, 0.0F}), 4);
  EXPECT_EQ(rows.scales[0], 0.0F);
  EXPECT_EQ(rows.codes, std::vector<uint8_t>(4, 0));
}

TEST(Quantize, TheLargestAndTheSmallestBf16AreTaken) {
  const uint16_t kLargest = 0x7F7F;
  const uint16_t kSmallest = 0x0001;
  const Fp8Rows rows = quantize_fp8_kv({kLargest, 0x0000, kSmallest, 0x8000}, 2);
  EXPECT_EQ(rows.codes, (std::vector<uint8_t>{0x7E, 0x00, 0x7E, 0x80}));
  EXPECT_GT(rows.scales[1], 0.0F);
}

TEST(Decode, OneKeyGivesItsValueAndItsScore) {
  const std::vector<uint16_t> q = Bf16({1.0F, 2.0F});
  const std::vector<uint16_t> k = Bf16({3.0F, -1.0F});
  const std::vector<uint16_t> v = Bf16({5.0F, 7.0F});
  DecodeInput input;
  input.k.rows = k.data();
  input.v.rows = v.data();
  input.q = q.data();
  input.head_dim = 2;
  input.sm_scale = 0.5F;
  const DecodeOutput output = Decode(input);
  EXPECT_EQ(output.out, (std::vector<double>{5.0, 7.0}));
  EXPECT_EQ(output.lse[0], 0.5);
}

TEST(Decode, EqualScoresGiveTheMeanOfTheWindow) {
  const std::vector<uint16_t> q = Bf16({0.0F});
  const std::vector<uint16_t> k = Bf16({1.0F, 2.0F, 3.0F, 4.0F});
  const std::vector<uint16_t> v = Bf16({100.0F, 1.0F, 2.0F, 100.0F});
  DecodeInput input;
  input.k.rows = k.data();
  input.v.rows = v.data();
  input.q = q.data();
  input.head_dim = 1;
  input.pos = 2;
  input.window = 2;  // keys 1 and 2
  const DecodeOutput output = Decode(input);
  EXPECT_DOUBLE_EQ(output.out[0], 1.5);
  EXPECT_DOUBLE_EQ(output.lse[0], std::log(2.0));
}

TEST(Decode, WithNoKeyTheOutputIsZeroAndLseIsTheSinkOrMinusInfinity) {
  const std::vector<uint16_t> q = Bf16({1.0F});
  const float sink = 0.75F;
  DecodeInput input;
  input.q = q.data();
  input.head_dim = 1;
  input.pos = -1;
  EXPECT_EQ(Decode(input).lse[0], -std::numeric_limits<double>::infinity());
  EXPECT_EQ(Decode(input).out[0], 0.0);
  input.sink_logits = &sink;
  EXPECT_EQ(Decode(input).lse[0], 0.75);
  EXPECT_EQ(Decode(input).out[0], 0.0);
}

TEST(Decode, TheSoftcapBoundsAScore) {
  const std::vector<uint16_t> q = Bf16({1.0F});
  const std::vector<uint16_t> k = Bf16({1000.0F});
  DecodeInput input;
  input.k.rows = k.data();
  input.v.rows = k.data();
  input.q = q.data();
  input.head_dim = 1;
  input.softcap = 30.0F;
  EXPECT_DOUBLE_EQ(Decode(input).lse[0], 30.0);
}

TEST(Format, AttentionOverACacheSeesEachSequencesOwnLength) {
  Fp8KVCache cache(/*seqs=*/2, /*kv_heads=*/1, /*head_dim=*/2);
  cache.append(0, Bf16({1.0F, 0.0F, 0.0F, 1.0F}), Bf16({4.0F, 0.0F, 0.0F, 4.0F}));
  cache.append(1, Bf16({1.0F, 0.0F}), Bf16({7.0F, 7.0F}));
  EXPECT_EQ(cache.seq_len(0), 2);
  const std::vector<double> out =
      fp8_kv_attention(Bf16({0.0F, 0.0F, 0.0F, 0.0F}), /*q_heads=*/1, cache, {2, 1}, 1.0F);
  EXPECT_NEAR(out[0], 2.0, 1e-6);
  EXPECT_NEAR(out[1], 2.0, 1e-6);
  EXPECT_NEAR(out[2], 7.0, 1e-6);
}

TEST(Format, ErrorIsZeroForRowsThatCodesHoldExactly) {
  const std::vector<uint16_t> exact = Bf16({448.0F, 1.0F, -20.0F, 0.5F});
  const std::vector<uint16_t> off = Bf16({448.0F, 1.0F, 1.0F + 0x1p-6F, 27.0F});
  const Fp8KvErrorResult error = fp8_kv_error(exact, off, 4);
  EXPECT_EQ(error.k, 0.0);
  EXPECT_GT(error.v, 0.0);
  EXPECT_GE(error.v_worst_row, error.v);
}

// Rounding is at most 2^-4 of an element above the subnormals, 2^-10 of the scale below them.
TEST(Format, ErrorOfNormalRowsIsThatOfThreeMantissaBits) {
  cases::Random random(3);
  std::vector<uint16_t> rows(1000 * 128);
  for (uint16_t& x : rows) x = FloatToBf16(random.Normal());
  const Fp8KvErrorResult error = fp8_kv_error(rows, rows, 128);
  EXPECT_GT(error.k, 0.02);
  EXPECT_LT(error.k, 0.03);
  EXPECT_LT(error.k_worst_row, 0x1p-4);
}

TEST(Format, ErrorOfRowsInPartsIsThatOfAllAtOnce) {
  cases::Random random(4);
  std::vector<uint16_t> rows(101 * 64);
  for (uint16_t& x : rows) x = FloatToBf16(random.Normal());
  const Fp8KvErrorResult whole = fp8_kv_error(rows, rows, 64);
  RowsErrorSum parts(64);
  for (const auto& [begin, end] : {std::pair(0, 1), std::pair(1, 1), std::pair(1, 101)}) {
    parts.Add({rows.begin() + begin * 64, rows.begin() + end * 64});
  }
  EXPECT_EQ(parts.overall(), whole.k);
  EXPECT_EQ(parts.worst_row(), whole.k_worst_row);
}

TEST(Cases, EachHasANameOfItsOwnAndAtLeast64PairsUnlessFewAreItsPoint) {
  for (const cases::Set set : {cases::Set::kShort, cases::Set::kFull}) {
    std::set<std::string> names;
    for (const cases::Case& c : cases::Cases(set)) {
      EXPECT_TRUE(names.insert(c.name).second) << c.name;
      EXPECT_EQ(cases::Pairs(c) < cases::kPairsMin, c.few_pairs) << c.name;
      EXPECT_TRUE(!c.few_pairs || c.name.starts_with("equal_rows_") ||
                  c.name.starts_with("unequal_rows_4x") ||
                  c.name.find("_long_pair") != std::string::npos)
          << c.name;
      for (const cases::Row& row : c.rows) {
        EXPECT_LE(row.pos + row.q_len, row.seq_len) << c.name;
        EXPECT_LE(row.q_len, kQLenMax) << c.name;
      }
    }
  }
}

TEST(Cases, BrokenScalesFail) { EXPECT_EQ(cases::CheckThatBrokenScalesFail(), ""); }

}  // namespace
}  // namespace fp8kvd::kernels::reference
