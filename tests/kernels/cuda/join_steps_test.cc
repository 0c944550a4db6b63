// Which CTAs of a pair join which of its pieces.
#include "kernels/cuda/any/decode/join_steps.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

#include "kernels/cuda/decode_table.h"
#include "kernels/cuda/launch_shape.h"
#include "tests/kernels/cuda/h200.h"

namespace fp8kvd::kernels::cuda {
namespace {

// CTAs whose pieces are in what a CTA joins, in that order.
std::vector<int32_t> CtasOf(const auto& pieces, const std::vector<std::vector<int32_t>>& left) {
  std::vector<int32_t> ctas;
  for (int32_t i = 0; i < pieces.count; ++i) {
    const std::vector<int32_t>& of_piece = left[pieces.At(i)];
    ctas.insert(ctas.end(), of_piece.begin(), of_piece.end());
  }
  return ctas;
}

TEST(JoinSteps, TheLastCtaHasEachPieceOnceAndInOrder) {
  for (int32_t ctas = 1; ctas <= 300; ++ctas) {
    std::vector<std::vector<int32_t>> left;  // by CTA, when it goes
    for (int32_t cta = 0; cta < ctas; ++cta) {
      left.push_back({cta});
      if (cta + 1 == ctas || !EndsStep(cta)) continue;
      const PiecesInLine step = PiecesOfStep(cta);
      EXPECT_EQ(step.At(step.count - 1), cta) << "its own is the last";
      left[cta] = CtasOf(step, left);
    }
    const PiecesOfSteps last = PiecesAfterSteps(ctas - 1);
    EXPECT_EQ(last.At(last.count - 1), ctas - 1);
    EXPECT_LE(last.count, ctas / kStepCtas + kStepCtas);
    std::vector<int32_t> all(ctas);
    for (int32_t cta = 0; cta < ctas; ++cta) all[cta] = cta;
    EXPECT_EQ(CtasOf(last, left), all);
  }
}

TEST(JoinSteps, ArePiecesThatDoNotFitAtOnce) {
  EXPECT_FALSE(JoinsInSteps(48 * 100, 100, 49)) << "49 CTAs at most";
  EXPECT_TRUE(JoinsInSteps(48 * 100 + 1, 100, 49));
  EXPECT_FALSE(JoinsInSteps(15 * 100, 100, 8)) << "so few are read where they lie";
  EXPECT_TRUE(JoinsInSteps(15 * 100 + 1, 100, 8));
  EXPECT_FALSE(JoinsInSteps(1 << 22, 100, 7)) << "not even a step fits";
}

// What the case one_long_pair of the kernel test is for.
TEST(JoinSteps, AreTakenForALongPairAlone) {
  for (const DecodeKernel& kernel : DecodeTable()) {
    if (kernel.grain.columns > 8) continue;
    std::vector<DecodeRow> rows(1);
    rows[0].pos = kernel.head_dim == 64 ? 69999 : 29999;
    rows[0].q_len = 1;
    rows[0].kv_heads = 1;
    const LaunchWork work = WorkOfRows(rows, 8, kernel.grain, false);
    const LaunchShape shape = ShapeFor(kernel, kH200, rows, 8, work);
    ASSERT_EQ(shape.cluster, 0);
    const int32_t share = ShareOf(static_cast<int32_t>(work.units), shape.ctas, work.items_max,
                                  CtaSlack(shape.warps, kernel.grain));
    const auto piece_bytes = 4 * static_cast<int32_t>(PieceFloats(8, kernel.head_dim));
    const int32_t fit_max = kH200.shared_per_cta / piece_bytes;
    EXPECT_TRUE(JoinsInSteps(static_cast<int32_t>(work.units), share, fit_max))
        << "sm_" << kernel.sm << " d" << kernel.head_dim;
  }
}

}  // namespace
}  // namespace fp8kvd::kernels::cuda
