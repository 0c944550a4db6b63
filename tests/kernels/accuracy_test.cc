// MeasureAccuracy against errors worked by hand.
#include "kernels/reference/accuracy.h"

#include <cmath>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/kernels/bf16_values.h"

namespace fp8kvd::kernels::reference {
namespace {

// One head of two elements, three tokens, of which the last is the first step's own. K is zero, so
// each token weighs a third.
AttentionRows Rows(const std::vector<float>& v) {
  AttentionRows rows;
  rows.k = Bf16({0, 0, 0, 0, 0, 0});
  rows.v = Bf16(v);
  rows.q = Bf16({1, 1});
  rows.positions = {2};
  rows.head_dim = 2;
  return rows;
}

TEST(MeasureAccuracy, ByHandForEveryWay) {
  // Rows 448 17 | 448 0 | 896 0. Per row: 17 becomes 16, all else is exact. 896 is beyond what the
  // static scale of 1 knew: clipped to 448.
  const Accuracy a = MeasureAccuracy(Rows({448, 17, 448, 0, 896, 0}));
  const double v_norm = std::sqrt(448.0 * 448 + 17 * 17 + 448 * 448 + 896 * 896);
  EXPECT_NEAR(a.of(Way::kRow).v, 1 / v_norm, 1e-12);
  // Output (1792 / 3, 17 / 3): off by a third in the second element.
  const double out_norm = std::sqrt(1792.0 * 1792 + 17 * 17) / 3;
  EXPECT_NEAR(a.of(Way::kRow).op, 1.0 / 3 / out_norm, 1e-12);
  EXPECT_NEAR(a.of(Way::kRow).op_worst_row, 1.0 / 3 / out_norm, 1e-12);
  EXPECT_EQ(a.of(Way::kRow).saturated, 0);
  EXPECT_EQ(a.of(Way::kRowKOnly).op, 0);
  EXPECT_NEAR(a.of(Way::kRowVOnly).op, a.of(Way::kRow).op, 1e-15);
  for (const Way way : {Way::kHead, Way::kTensor, Way::kUnit}) {
    SCOPED_TRACE(WayName(way));
    EXPECT_NEAR(a.of(way).v, std::sqrt(448.0 * 448 + 1) / v_norm, 1e-12);
    EXPECT_NEAR(a.of(way).op, std::sqrt(448.0 * 448 + 1) / 3 / out_norm, 1e-12);
    EXPECT_NEAR(a.of(way).saturated, 1.0 / 12, 1e-15);
  }
  // Read back as bf16, which holds 448 and 16 exactly.
  EXPECT_NEAR(a.of(Way::kTransformers).op, a.of(Way::kTensor).op, 1e-15);
}

TEST(MeasureAccuracy, TransformersRoundsWhatItReadsBack) {
  // Scale 7 / 448 = 2^-6: 0.4375 = 28 x 2^-6 is exact. Scale 3 / 448: 1 becomes 144 x 3 / 448 =
  // 0.96429, which bf16 rounds to 0.96484.
  const Accuracy exact = MeasureAccuracy(Rows({7, 0.4375F, 7, 7, 7, 7}));
  EXPECT_EQ(exact.of(Way::kTransformers).v, 0);
  const Accuracy rounded = MeasureAccuracy(Rows({3, 3, 3, 3, 1, 1}));
  EXPECT_NEAR(rounded.of(Way::kTensor).v, std::sqrt(2.0) * (1 - 144.0 * 3 / 448) / std::sqrt(38.0),
              1e-7);
  EXPECT_NEAR(rounded.of(Way::kTransformers).v, std::sqrt(2.0) * 0.03515625 / std::sqrt(38.0),
              1e-7);
}

TEST(MeasureAccuracy, CountsElementsBelowTheNormalCodes) {
  // 448 beside 2^-6, the least normal, and half of it.
  const Accuracy a = MeasureAccuracy(Rows({448, 0x1p-6F, 448, 0x1p-7F, 448, 448}));
  EXPECT_NEAR(a.v.subnormal, 1.0 / 6, 1e-15);
}

// A piece is one step of attention, however many there are.
TEST(MeasureAccuracy, InPiecesIsTheSame) {
  AttentionRows rows = Rows({448, 17, 448, 0, 896, 0});
  rows.q = Bf16({1, 1, 2, 0.5});
  rows.positions = {1, 2};
  const Accuracy whole = MeasureAccuracy(rows);
  AccuracyMeasurement measurement(rows);
  int pieces = 1;
  while (measurement.Continue() && pieces < 100) ++pieces;
  EXPECT_EQ(pieces, 2 * (kWays + 2)) << "exact, each way, and scores";
  for (int way = 0; way < kWays; ++way) {
    EXPECT_EQ(measurement.accuracy().ways[way].op, whole.ways[way].op);
    EXPECT_EQ(measurement.accuracy().ways[way].op_worst_row, whole.ways[way].op_worst_row);
  }
  EXPECT_GT(whole.of(Way::kUnit).op, 0);
  EXPECT_EQ(measurement.accuracy().score_spread, whole.score_spread);
  EXPECT_EQ(measurement.accuracy().effective_keys, whole.effective_keys);
}

TEST(MeasureAccuracy, NamesTheRowsThatSuffer) {
  const Accuracy a = MeasureAccuracy(Rows({448, 0, 448, 17, 448, 34}));
  ASSERT_EQ(a.v.worst.size(), 3u);
  EXPECT_EQ(a.v.worst[0].token, 2);  // 34 becomes 32
  EXPECT_NEAR(a.v.worst[0].error, 2 / std::sqrt(448.0 * 448 + 34 * 34), 1e-12);
  EXPECT_EQ(a.v.worst[1].token, 1);
  EXPECT_TRUE(a.k.worst.empty());  // zero rows have no error
}

TEST(MeasureAccuracy, TellsTheSpreadOfTheScoresAndTheKeysAveraged) {
  AttentionRows rows = Rows({1, 1, 1, 1, 1, 1});
  // Scores 0, 0 and ln 2 (as bf16 has it): weights 1/4, 1/4, 1/2.
  rows.k = Bf16({0, 0, 0, 0, std::log(2.0F), 0});
  const double ln2 = double{Bf16ToFloat(FloatToBf16(std::log(2.0F)))};
  const Accuracy a = MeasureAccuracy(rows);
  EXPECT_NEAR(a.score_spread, ln2 * std::sqrt(2.0) / 3, 1e-9);
  EXPECT_NEAR(a.effective_keys, 16.0 / 6, 0.01);
  rows.window = 1;
  EXPECT_EQ(MeasureAccuracy(rows).score_spread, 0);
  EXPECT_EQ(MeasureAccuracy(rows).effective_keys, 1);
}

TEST(MeasureAccuracy, AHeadsStaticScaleIsItsOwn) {
  AttentionRows rows;
  rows.kv_heads = 2;
  rows.head_dim = 1;
  rows.k = Bf16({0, 0, 0, 0});
  rows.v = Bf16({448, 17, 448, 17});  // head 1 holds 17 alone: exact by its own scale
  rows.q = Bf16({1, 1});
  rows.positions = {1};
  const Accuracy a = MeasureAccuracy(rows);
  EXPECT_NEAR(a.of(Way::kHead).op, 0, 1e-7);
  EXPECT_NEAR(a.of(Way::kTensor).op, 1 / std::sqrt(448.0 * 448 + 17 * 17), 1e-7);
}

}  // namespace
}  // namespace fp8kvd::kernels::reference
