// Which launches of pairs that are not equally long go by whole pairs, and what shape they get.
#include "kernels/cuda/uneven_pairs.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

#include "kernels/cuda/decode_table.h"
#include "kernels/cuda/launch_shape.h"
#include "tests/kernels/cuda/h200.h"

namespace fp8kvd::kernels::cuda {
namespace {

constexpr int32_t kGroup = 8;
constexpr int32_t kKvHeads = 8;

std::vector<DecodeRow> RowsOf(const std::vector<int32_t>& lengths) {
  std::vector<DecodeRow> rows;
  for (const int32_t length : lengths) {
    DecodeRow row{};
    row.pos = length - 1;
    row.q_len = 1;
    row.kv_heads = kKvHeads;
    rows.push_back(row);
  }
  return rows;
}

// n lengths from `most` down to `least`.
std::vector<int32_t> Down(int32_t n, int32_t most, int32_t least) {
  std::vector<int32_t> lengths;
  for (int32_t i = 0; i < n; ++i) lengths.push_back(most - (most - least) * i / std::max(1, n - 1));
  return lengths;
}

LaunchShape ShapeOf(Precision precision, const std::vector<int32_t>& lengths, int32_t sm = 90,
                    bool batch_invariant = false) {
  const DecodeKernel& kernel = *FindDecodeKernel(sm, precision, 128, kGroup);
  const std::vector<DecodeRow> rows = RowsOf(lengths);
  return ShapeFor(kernel, kH200, rows, kGroup,
                  WorkOfRows(rows, kGroup, kernel.grain, batch_invariant));
}

constexpr Precision kPrecisions[] = {Precision::kFp8Kv, Precision::kBf16};

TEST(UnevenPairs, FewGetTheClustersOfEqualOnes) {
  for (const Precision precision : kPrecisions) {
    const LaunchShape shape = ShapeOf(precision, {1000, 700, 400, 20});
    EXPECT_EQ(shape.cluster, 2);
    EXPECT_EQ(shape.ctas, 2 * 4 * kKvHeads);
    EXPECT_EQ(shape.cluster, ShapeOf(precision, {1000, 1000, 1000, 1000}).cluster);
  }
}

TEST(UnevenPairs, ThatEndTogetherWhenTheLongOnesComeFirstGetACtaEach) {
  for (const Precision precision : kPrecisions) {
    std::vector<int32_t> lengths = Down(64, 4000, 157);
    const LaunchShape shape = ShapeOf(precision, lengths);
    EXPECT_EQ(shape.cluster, 1);
    EXPECT_EQ(shape.ctas, 64 * kKvHeads);
    EXPECT_EQ(shape.warps, 4);
    EXPECT_FALSE(shape.lets_next_late);
    std::ranges::reverse(lengths);
    EXPECT_EQ(ShapeOf(precision, lengths).cluster, 0) << "the longest would be left to the end";
  }
}

TEST(UnevenPairs, JustBeyondTheRoomForTwoAMultiprocessorGoOneByOneByEightWarps) {
  for (const Precision precision : kPrecisions) {
    const LaunchShape shape = ShapeOf(precision, Down(34, 4000, 100));  // 272 pairs
    EXPECT_EQ(shape.cluster, 1);
    EXPECT_EQ(shape.warps, 8);
  }
}

TEST(UnevenPairs, ManyShortOnesGoFourAMultiprocessor) {
  const DecodeKernel& kernel = *FindDecodeKernel(90, Precision::kFp8Kv, 128, kGroup);
  const LaunchShape shape = ShapeOf(Precision::kFp8Kv, Down(256, 300, 1));
  EXPECT_EQ(shape.cluster, 1);
  EXPECT_EQ(shape.warps, 4);
  EXPECT_LE(kernel.shared_bytes(256, shape), SharedOfEach(kH200, 4));
}

// Of four CTAs of four warps a multiprocessor holds the registers for heads of up to 128 dimensions
// and eight columns.
TEST(UnevenPairs, GoFourAMultiprocessorOnlyWhereItHoldsTheirRegisters) {
  const std::vector<DecodeRow> rows = RowsOf(Down(256, 300, 1));
  for (const DecodeKernel& kernel : DecodeTable()) {
    if (kernel.sm != 90) continue;
    const LaunchWork work = WorkOfRows(rows, 1, kernel.grain, false);
    const PairWay way = WayOfUnevenPairs(kernel, kH200, rows, 1, work, 1);
    const bool has_room = kernel.grain.columns == 8 && kernel.head_dim <= 128;
    EXPECT_EQ(kernel.pair_ctas, has_room ? 2 : 1);
    EXPECT_TRUE(way.ctas < 4 || has_room) << "d" << kernel.head_dim;
    EXPECT_TRUE(way.ctas == 4 || !has_room || kernel.head_dim != 128);
  }
}

// What was faster on an H200, us: cut, and whole by CTAs of four warps, two a multiprocessor.
TEST(UnevenPairs, Of32ColumnsAreCutWhereTheyAreShort) {
  const auto is_cut = [](int32_t head_dim, const std::vector<int32_t>& lengths) {
    const DecodeKernel& kernel = *FindDecodeKernel(90, Precision::kBf16, head_dim, 32);
    const std::vector<DecodeRow> rows = RowsOf(lengths);
    const LaunchWork work = WorkOfRows(rows, 32, kernel.grain, false);
    return ShapeFor(kernel, kH200, rows, 32, work).cluster == 0;
  };
  EXPECT_TRUE(is_cut(64, Down(256, 500, 1))) << "50.9, 69.5";
  EXPECT_TRUE(is_cut(80, Down(256, 500, 1))) << "66.0, 78.5";
  EXPECT_TRUE(is_cut(64, Down(128, 300, 1))) << "24.6, 30.1";
  EXPECT_FALSE(is_cut(64, Down(64, 1000, 1))) << "28.1, 25.7";
  EXPECT_FALSE(is_cut(80, Down(64, 1000, 1))) << "42.6, 28.8";
  EXPECT_FALSE(is_cut(128, Down(64, 1000, 1))) << "61.5, 41.3";
}

TEST(UnevenPairs, AreCutWhereOneWouldEndLate) {
  for (const Precision precision : kPrecisions) {
    std::vector<int32_t> lengths(32, 4096);
    lengths[0] = 65536;
    EXPECT_EQ(ShapeOf(precision, lengths).cluster, 0);
    EXPECT_EQ(ShapeOf(precision, Down(32, 65000, 8000)).cluster, 0) << "256 pairs, 264 places";
  }
}

TEST(UnevenPairs, AreCutWhereWholeOnesCannotGo) {
  const std::vector<int32_t> lengths = Down(64, 4000, 157);
  EXPECT_EQ(ShapeOf(Precision::kFp8Kv, lengths, 80).cluster, 0) << "not Hopper";
  EXPECT_EQ(ShapeOf(Precision::kFp8Kv, lengths, 90, true).cluster, 0) << "cut by the row alone";
  std::vector<DecodeRow> rows = RowsOf(lengths);
  rows[3].kv_heads = 1;
  const DecodeKernel& kernel = *FindDecodeKernel(90, Precision::kFp8Kv, 128, kGroup);
  const LaunchWork work = WorkOfRows(rows, kGroup, kernel.grain, false);
  EXPECT_EQ(ShapeFor(kernel, kH200, rows, kGroup, work).cluster, 0) << "other numbers of pairs";
}

TEST(UnevenPairs, HaveShapesThatFitTheDevice) {
  for (const DecodeKernel& kernel : DecodeTable()) {
    if (kernel.sm != 90) continue;
    for (const int32_t n : {2, 5, 16, 40, 130, 300, 1024}) {
      for (const int32_t most : {30, 300, 3000, 30000}) {
        for (const int32_t kv_heads : {1, 3, 8, 300}) {
          std::vector<DecodeRow> rows = RowsOf(Down(n, most, 1));
          for (DecodeRow& row : rows) row.kv_heads = kv_heads;
          const LaunchWork work = WorkOfRows(rows, 1, kernel.grain, false);
          const LaunchShape shape = ShapeFor(kernel, kH200, rows, 1, work);
          ASSERT_GE(shape.stages, 1);
          ASSERT_GE(shape.warps, 1);
          ASSERT_LE(kernel.shared_bytes(n, shape), kH200.shared_per_cta);
          if (shape.cluster == 0) continue;
          ASSERT_EQ(shape.ctas, work.pairs * shape.cluster);
        }
      }
    }
  }
}

TEST(UnevenPairs, FewerThanAQuarterOfTheMultiprocessorsGetFourCtasEach) {
  for (const Precision precision : kPrecisions) {
    std::vector<DecodeRow> rows = RowsOf({1000, 1, 300, 520});
    for (DecodeRow& row : rows) row.kv_heads = 2;
    const DecodeKernel& kernel = *FindDecodeKernel(90, precision, 128, kGroup);
    const LaunchWork work = WorkOfRows(rows, kGroup, kernel.grain, false);
    EXPECT_EQ(ShapeFor(kernel, kH200, rows, kGroup, work).cluster, 4);
  }
}

// 16 and 32 columns of fp8_kv are bound by arithmetic, which a cut shares out best.
TEST(UnevenPairs, OfManyColumnsAreCutInFp8WhereTheyDoNotBeginAllAtOnce) {
  for (const int32_t group : {16, 32}) {
    const auto shape_of = [&](Precision precision, const std::vector<int32_t>& lengths) {
      const DecodeKernel& kernel = *FindDecodeKernel(90, precision, 128, group);
      const std::vector<DecodeRow> rows = RowsOf(lengths);
      return ShapeFor(kernel, kH200, rows, group, WorkOfRows(rows, group, kernel.grain, false));
    };
    EXPECT_EQ(shape_of(Precision::kFp8Kv, Down(64, 4000, 157)).cluster, 0) << group;
    EXPECT_EQ(shape_of(Precision::kFp8Kv, Down(256, 300, 1)).cluster, 0) << group;
    EXPECT_EQ(shape_of(Precision::kBf16, Down(64, 4000, 157)).cluster, 1) << group;
    EXPECT_GE(shape_of(Precision::kFp8Kv, {1000, 700, 400, 20}).cluster, 1) << "begin at once";
  }
}

bool Wants(const std::vector<int32_t>& lengths, Precision precision = Precision::kFp8Kv,
           int32_t group = kGroup) {
  const DecodeKernel& kernel = *FindDecodeKernel(90, precision, 128, group);
  const std::vector<DecodeRow> rows = RowsOf(lengths);
  return WantsLongestFirst(kernel, kH200, WorkOfRows(rows, group, kernel.grain, false));
}

TEST(UnevenPairs, ComeLongestFirstWhereTheirOrderMatters) {
  EXPECT_TRUE(Wants(Down(64, 4000, 157)));
  EXPECT_FALSE(Wants(std::vector<int32_t>(64, 2048))) << "equally long";
  EXPECT_FALSE(Wants(Down(16, 4000, 157))) << "all begin at once";
  EXPECT_TRUE(Wants(Down(17, 4000, 157))) << "136 pairs, 132 multiprocessors";
  EXPECT_TRUE(Wants(Down(132, 4000, 157))) << "8 pairs a multiprocessor";
  EXPECT_FALSE(Wants(Down(133, 4000, 157))) << "more";
  EXPECT_FALSE(Wants(Down(64, 4000, 157), Precision::kFp8Kv, 16)) << "are cut";
  EXPECT_TRUE(Wants(Down(64, 4000, 157), Precision::kBf16, 16));
  EXPECT_FALSE(Wants(Down(256, 1000, 1))) << "short ones do better beside long ones";
}

}  // namespace
}  // namespace fp8kvd::kernels::cuda
