#include "config/base/geometry.h"

#include <gtest/gtest.h>

#include "config/base/check.h"

namespace fp8kvd {
namespace {

TEST(Geometry, AFp8TokenIsTwoRowsOfCodesAndTwoScales) {
  EXPECT_EQ(KvBytesPerToken(Precision::kFp8Kv, 128), 128 + 128 + 4 + 4);
}

TEST(Geometry, ABf16TokenIsTwoRowsOfTwoBytes) {
  EXPECT_EQ(KvBytesPerToken(Precision::kBf16, 128), 2 * 128 * 2);
}

TEST(Geometry, APageHoldsEveryLayerAndKvHeadOfItsGroup) {
  const LayerGroup group = {
      .kv_heads = 8, .head_dim = 128, .precision = Precision::kFp8Kv, .layers = {0, 2, 4}};
  EXPECT_EQ(group.PageBytes(), int64_t{16896} * 8 * 3);
}

TEST(Geometry, TheLargestPageDoesNotOverflow) {
  const LayerGroup group = {.kv_heads = kKvHeadsMax,
                            .head_dim = kHeadDimMax,
                            .precision = Precision::kBf16,
                            .layers = std::vector<int32_t>(kLayersMax)};
  EXPECT_EQ(group.PageBytes(), int64_t{4} * 256 * 64 * 256 * 512);
}

TEST(Check, ABrokenInvariantAbortsAndSaysWhich) {
  EXPECT_DEATH(FP8KVD_CHECK(1 + 1 == 3), "bug: 1 \\+ 1 == 3 does not hold");
}

}  // namespace
}  // namespace fp8kvd
