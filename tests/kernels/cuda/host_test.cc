// What of the CUDA backend can be seen without a GPU: the layout, the cut, the table of kernels.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "config/base/limits.h"
#include "kernels/cuda/decode_table.h"
#include "kernels/cuda/decode_work.h"
#include "kernels/cuda/launch_shape.h"
#include "kernels/cuda/page_layout.h"
#include "kernels/cuda/sm90/decode/join_share.h"
#include "kernels/cuda/step_args.h"
#include "kernels/cuda/step_shape.h"
#include "tests/kernels/cuda/h200.h"

namespace fp8kvd::kernels::cuda {
namespace {

template <Precision kPrecision>
std::set<int32_t> PlacesOfTile(int32_t head_dim) {
  std::set<int32_t> places;  // bytes
  for (const bool is_key : {true, false}) {
    const int32_t start = is_key ? 0 : TileOperandBytes(kPrecision, head_dim);
    for (int32_t token = 0; token < kTileTokens; ++token) {
      for (int32_t dim = 0; dim < head_dim; ++dim) {
        const int32_t place = is_key ? KPlace<kPrecision>(head_dim, token, dim)
                                     : VPlace<kPrecision>(head_dim, token, dim);
        places.insert(start + place);
      }
    }
  }
  return places;
}

TEST(PageLayout, EachElementOfATileHasAPlaceOfItsOwn) {
  for (const int32_t head_dim : kHeadDims) {
    const size_t elements = size_t{2} * kTileTokens * head_dim;
    for (const std::set<int32_t>& places :
         {PlacesOfTile<Precision::kFp8Kv>(head_dim), PlacesOfTile<Precision::kBf16>(head_dim)}) {
      EXPECT_EQ(places.size(), elements) << "d" << head_dim;
    }
    EXPECT_LT(*PlacesOfTile<Precision::kFp8Kv>(head_dim).rbegin(), TileKScales(head_dim));
    EXPECT_LT(*PlacesOfTile<Precision::kBf16>(head_dim).rbegin(),
              TileBytes(Precision::kBf16, head_dim));
  }
}

TEST(PageLayout, BlocksAreMultiplesOf16Bytes) {
  for (const int32_t head_dim : kHeadDims) {
    EXPECT_EQ(BlockBytesOf(Precision::kFp8Kv, head_dim) % 16, 0);
    EXPECT_EQ(BlockBytesOf(Precision::kBf16, head_dim) % 16, 0);
  }
}

DecodeRow RowOf(int32_t pos, int32_t q_len, int32_t window) {
  DecodeRow row{};
  row.pos = pos;
  row.q_len = q_len;
  row.window = window;
  row.kv_heads = 3;
  return row;
}

TEST(DecodeWork, AWindowSkipsTheUnitsBeforeIt) {
  const Grain grain = {32, 8};
  const RowWork work = WorkOf(RowOf(999, 1, 100), 4, grain);
  EXPECT_EQ(work.first_unit, 900 / 32);
  EXPECT_EQ(work.units, (1000 + 31) / 32 - 900 / 32);
  EXPECT_EQ(work.pairs, 3);
}

TEST(DecodeWork, ARowWithoutAKeyStillHasAUnit) {
  EXPECT_EQ(WorkOf(RowOf(-1, 1, 0), 4, {32, 8}).units, 1);
}

TEST(DecodeWork, MoreColumnsThanAKernelHoldsAreMorePairs) {
  EXPECT_EQ(WorkOf(RowOf(99, 5, 0), 4, {32, 8}).pairs, 3 * 3);
}

TEST(DecodeWork, GroupInverseDividesEveryColumn) {
  for (int32_t group = 1; group <= kGroupMax; ++group) {
    for (int32_t column = 0; column < kQLenMax * group; ++column) {
      ASSERT_EQ((column * GroupInverse(group)) >> 16, column / group);
    }
  }
}

TEST(ShareOf, RoundsToWholePairsWhereThatIsNear) {
  EXPECT_EQ(ShareOf(65536, 132, 64, 16), 512);     // 497 even: 8 pairs of 64
  EXPECT_EQ(ShareOf(131072, 132, 256, 16), 1024);  // 993 even: 4 pairs of 256
}

TEST(ShareOf, RoundsToAFractionOfAPairWhereThatIsNear) {
  EXPECT_EQ(ShareOf(32768, 132, 8192, 16), 256);  // 249 even: a 32nd
}

TEST(ShareOf, IsEvenWherePairsDiffer) { EXPECT_EQ(ShareOf(1000, 132, 0, 16), 8); }

// Checks that the kernels make: one by the first warp of each CTA after each `every` units.
int64_t ChecksMade(int32_t units, int32_t share, int32_t warps, int32_t pair_units, int32_t every) {
  int64_t checks = 0;
  for (int64_t first = 0; first < units; first += share) {
    const auto of_cta = static_cast<int32_t>(std::min<int64_t>(share, units - first));
    checks += std::min(of_cta, ShareOf(of_cta, warps, pair_units, 0)) / every;
  }
  return checks;
}

// One check more or less than planned, and the counter would not be 0 for the next launch.
TEST(PaceFor, CountsEveryCheckOfALaunch) {
  for (const int32_t pair_units : {0, 1, 7, 64, 256, 8192}) {
    for (const int32_t warps : {1, 4, 5, 8}) {
      for (int32_t units = 1; units < 1 << 22; units += 1 + units / 7) {
        const int32_t share = ShareOf(units, 132, pair_units, CtaSlack(warps, {32, 8}));
        const PacePlan plan = PaceFor(units, share, warps, pair_units);
        if (plan.every == kNoPace.every) continue;
        ASSERT_EQ(plan.checks, ChecksMade(units, share, warps, pair_units, plan.every))
            << units << " units, pairs of " << pair_units << ", " << warps << " warps";
        ASSERT_EQ(plan.every & (plan.every - 1), 0);
        int64_t checks = 0;
        for (int32_t cta = 0; cta < 132; ++cta) checks += plan.ChecksOf(cta);
        ASSERT_EQ(checks, plan.checks);
      }
    }
  }
}

TEST(PaceFor, ChecksAFewTimesAWarpAndNotWhereThereIsLittleToDo) {
  EXPECT_EQ(PaceFor(32768, 256, 8, 8192).every, 4);    // 32 units a warp
  EXPECT_EQ(PaceFor(131072, 1024, 4, 256).every, 16);  // not 32
  EXPECT_EQ(PaceFor(128 * 128, 128, 4, 32).every, kNoPace.every);
  EXPECT_EQ(PaceFor(4096, 8192, 8, 0).every, kNoPace.every);  // no CTA has a whole share
}

TEST(PaceFor, HoldsAWarpWithALongWayToGoBackMore) {
  EXPECT_EQ(PaceFor(131072, 1024, 4, 256).fewer, 2);
  EXPECT_EQ(PaceFor(98304, 768, 4, 192).fewer, 1);
}

// Bytes that a CTA waits for and nobody sends would hang a launch.
TEST(JoinShare, GivesEachItemOneCtaAndAPlaceOfItsOwn) {
  for (int32_t bits = 0; bits <= 3; ++bits) {
    const int32_t cluster = 1 << bits;
    const JoinShare share = {bits};
    for (int32_t items = 4; items <= 32 * 256 / 4; items += 4) {
      std::vector<int32_t> counts(cluster);
      for (int32_t item = 0; item < items; ++item) {
        const int32_t cta = share.CtaOf(item);
        ASSERT_LT(cta, cluster);
        ASSERT_EQ(share.PlaceOf(item), counts[cta]++) << "they come in order";
        ASSERT_EQ(share.ItemAt(cta, share.PlaceOf(item)), item);
      }
      for (int32_t cta = 0; cta < cluster; ++cta) {
        ASSERT_EQ(share.CountOf(items, cta), counts[cta]) << items << " items, CTA " << cta;
        ASSERT_LE(counts[cta], JoinPlacesMax(items, cluster));
        ASSERT_LE(JoinPlacesMax(items, cluster), JoinPlacesMax(items + 1, cluster));
      }
    }
  }
}

TEST(JoinShare, ACtasResultsAreWholeLines) {
  const JoinShare share = {3};
  for (int32_t item = 0; item < 256; ++item) {
    EXPECT_EQ(share.CtaOf(item), share.CtaOf(item / 16 * 16));  // of 8 bytes each in bf16
  }
}

TEST(LaunchShape, FitsTheDeviceForEveryKernelAndLength) {
  DeviceLimits one_warpgroup = kH200;
  one_warpgroup.one_warpgroup = true;
  const DeviceLimits small = {80, 102400, 101376};  // sm_86
  for (const DecodeKernel& kernel : DecodeTable()) {
    for (const DeviceLimits& device : {kH200, one_warpgroup, small}) {
      if (device.shared_per_cta < kH200.shared_per_cta && kernel.sm == 90) continue;
      for (const int32_t tokens : {1, 77, 2048, 262144}) {
        for (const int32_t rows_count : {1, 16, 1024}) {
          const std::vector<DecodeRow> rows(rows_count, RowOf(tokens - 1, 1, 0));
          const LaunchWork work = WorkOfRows(rows, 8, kernel.grain, false);
          const LaunchShape shape = ShapeFor(kernel, device, rows, 8, work);
          EXPECT_LE(kernel.shared_bytes(rows_count, shape), device.shared_per_cta);
          EXPECT_GE(shape.warps, 1);
          EXPECT_GE(shape.stages, 1);
          if (shape.cluster > 0) {
            EXPECT_LE(shape.warps, 8);
            EXPECT_EQ(shape.ctas, work.pairs * shape.cluster);
            continue;  // leaves no pieces
          }
          const bool is_alone = device.one_warpgroup && kernel.worker_warps > 1;
          EXPECT_LE(shape.warps, is_alone ? 1 : kernel.workers_max);
          EXPECT_LE(PiecesNeeded(shape), ShapePiecesMax(device));
          EXPECT_LE(shape.ctas, ShapeCtasMax(device));
        }
      }
    }
  }
}

LaunchShape ShapeOf(int32_t sm, Precision precision, const std::vector<DecodeRow>& rows,
                    bool batch_invariant) {
  const DecodeKernel& kernel = *FindDecodeKernel(sm, precision, 128, 8);
  return ShapeFor(kernel, kH200, rows, 8, WorkOfRows(rows, 8, kernel.grain, batch_invariant));
}

TEST(LaunchShape, GivesFewEqualShortPairsAClusterEach) {
  const std::vector<DecodeRow> one(1, RowOf(1023, 1, 0));  // 3 pairs
  EXPECT_EQ(ShapeOf(90, Precision::kFp8Kv, one, false).cluster, 4);
  const std::vector<DecodeRow> ten(10, RowOf(1023, 1, 0));  // 30 pairs
  EXPECT_EQ(ShapeOf(90, Precision::kFp8Kv, ten, false).cluster, 2);
  EXPECT_EQ(ShapeOf(90, Precision::kFp8Kv, ten, false).row_pairs, 3);
}

TEST(LaunchShape, GivesAPairAsManyCtasAsItsWarpsWouldNeedForAUnitEach) {
  const auto cluster = [](Precision precision, int32_t tokens) {
    return ShapeOf(90, precision, {RowOf(tokens - 1, 1, 0)}, false).cluster;
  };
  for (const auto& [tokens, ctas] : {std::pair(256, 1), {257, 2}, {512, 2}, {513, 4}, {2048, 8}}) {
    EXPECT_EQ(cluster(Precision::kFp8Kv, tokens), ctas) << tokens;
  }
  EXPECT_EQ(cluster(Precision::kBf16, 384), 1) << "their units are soon done with";
  EXPECT_EQ(cluster(Precision::kBf16, 385), 2);
}

TEST(LaunchShape, GivesManyShortPairsACtaEachEvenWhereAMultiprocessorGetsAHandful) {
  const auto cluster = [](int32_t rows_count, int32_t tokens) {
    const std::vector<DecodeRow> rows(rows_count, RowOf(tokens - 1, 1, 0));  // 3 pairs each
    return ShapeOf(90, Precision::kFp8Kv, rows, false).cluster;
  };
  for (const auto& [tokens, ctas] : {std::pair(64, 1), {128, 0}, {256, 1}, {257, 0}}) {
    EXPECT_EQ(cluster(200, tokens), ctas) << tokens;
  }
  EXPECT_EQ(cluster(176, 512), 1) << "four of each multiprocessor are there at once";
}

TEST(LaunchShape, GivesPairsOfAFewTilesSmallUnits) {
  const std::vector<DecodeRow> few(3, RowOf(63, 1, 0));
  const std::vector<DecodeRow> more(3, RowOf(64, 1, 0));
  EXPECT_TRUE(ShapeOf(90, Precision::kFp8Kv, few, false).few_tiles);
  EXPECT_FALSE(ShapeOf(90, Precision::kFp8Kv, more, false).few_tiles);
  EXPECT_FALSE(ShapeOf(90, Precision::kFp8Kv, few, true).few_tiles);
}

TEST(LaunchShape, CountsTheUnitsOfPairsWhereTheyAreSmallerThanThoseOfACut) {
  const DecodeKernel& kernel = *FindDecodeKernel(90, Precision::kFp8Kv, 64, 8);
  ASSERT_EQ(kernel.grain.unit_tokens, 64);
  ASSERT_EQ(kernel.pair_unit_tokens, 32);
  for (const auto& [tokens, stages] : {std::pair(256, 1), {512, 2}, {1024, 2}, {2048, 3}}) {
    const std::vector<DecodeRow> rows(44, RowOf(tokens - 1, 1, 0));  // 132 pairs, 8 warps each
    const LaunchShape shape =
        ShapeFor(kernel, kH200, rows, 8, WorkOfRows(rows, 8, kernel.grain, false));
    ASSERT_EQ(shape.cluster, 1);
    EXPECT_EQ(shape.stages, stages) << tokens;
    EXPECT_LE(kernel.shared_bytes(44, shape), SharedOfEach(kH200, 2)) << "room for the next launch";
  }
}

TEST(LaunchShape, GivesLongPairsOfBf16ACtaEachWhereTheyFillRounds) {
  const std::vector<DecodeRow> one_round(88, RowOf(8191, 1, 0));  // 264 pairs, two a multiprocessor
  EXPECT_EQ(ShapeOf(90, Precision::kBf16, one_round, false).cluster, 1);
  EXPECT_EQ(ShapeOf(90, Precision::kFp8Kv, one_round, false).cluster, 0);
  const std::vector<DecodeRow> more(100, RowOf(8191, 1, 0));  // 36 would be left for a second round
  EXPECT_EQ(ShapeOf(90, Precision::kBf16, more, false).cluster, 0);
}

TEST(LaunchShape, GivesLongPairsClustersWhereTheNextLaunchFindsRoomOrNoneIsIdle) {
  const auto cluster = [](Precision precision, int32_t rows_count, int32_t tokens) {
    const std::vector<DecodeRow> rows(rows_count, RowOf(tokens - 1, 1, 0));  // 3 pairs each
    return ShapeOf(90, precision, rows, false).cluster;
  };
  EXPECT_EQ(cluster(Precision::kFp8Kv, 10, 8192), 2) << "60 CTAs of 132";
  EXPECT_EQ(cluster(Precision::kFp8Kv, 24, 4096), 0) << "72 CTAs";
  EXPECT_EQ(cluster(Precision::kFp8Kv, 40, 8192), 1) << "120 CTAs";
  EXPECT_EQ(cluster(Precision::kFp8Kv, 10, 32768), 0) << "arithmetic does not keep up";
  EXPECT_EQ(cluster(Precision::kFp8Kv, 32, 4096), 1) << "96 CTAs";
  EXPECT_EQ(cluster(Precision::kFp8Kv, 32, 8192), 0);
  EXPECT_EQ(cluster(Precision::kBf16, 10, 8192), 2) << "60 CTAs";
  EXPECT_EQ(cluster(Precision::kBf16, 10, 32768), 0) << "the cut reads faster";
  EXPECT_EQ(cluster(Precision::kBf16, 24, 1024), 1) << "72 CTAs";
  EXPECT_EQ(cluster(Precision::kBf16, 24, 2048), 0);
  EXPECT_EQ(cluster(Precision::kBf16, 40, 32768), 1) << "120 CTAs";
  EXPECT_EQ(cluster(Precision::kBf16, 5, 8192), 0) << "15 clusters of 4";
}

TEST(InvariantItems, FollowFromTheRowAndAreAtMostAsManyAsThereIsRoomFor) {
  for (const DecodeKernel& kernel : DecodeTable()) {
    for (const auto& [tokens, items] : {std::pair(1, 1),
                                        {512, 1},
                                        {2048, 4},
                                        {4096, 4},
                                        {8192, 8},
                                        {65536, 64},
                                        {131072, 64},
                                        {262144, 128},
                                        {1 << 20, 128}}) {
      EXPECT_EQ(InvariantItems(RowOf(tokens - 1, 1, 0), 8, kernel.grain), items) << tokens;
    }
  }
}

TEST(LaunchShape, CountsAnItemOfBatchInvariantAsTheUnitsThatItIs) {
  const std::vector<DecodeRow> few(6, RowOf(8191, 1, 0));    // 18 pairs of 8 items each
  const std::vector<DecodeRow> more(44, RowOf(8191, 1, 0));  // 132 pairs
  for (const Precision precision : {Precision::kFp8Kv, Precision::kBf16}) {
    const LaunchShape one_each = ShapeOf(90, precision, few, true);
    EXPECT_EQ(one_each.ctas, 132);  // for 144 items
    EXPECT_EQ(one_each.warps, 2);
    const LaunchShape eight_each = ShapeOf(90, precision, more, true);
    EXPECT_EQ(eight_each.ctas, 132);
    EXPECT_EQ(eight_each.warps, 8);
    for (const LaunchShape& shape : {one_each, eight_each}) {
      EXPECT_GE(shape.stages, 3);
      EXPECT_TRUE(shape.lets_next_late);
    }
  }
}

TEST(LaunchShape, CutsWhatClustersCannotServe) {
  std::vector<DecodeRow> rows(10, RowOf(1023, 1, 0));
  EXPECT_EQ(ShapeOf(80, Precision::kFp8Kv, rows, false).cluster, 0);  // not Hopper
  EXPECT_EQ(ShapeOf(90, Precision::kFp8Kv, rows, true).cluster, 0);   // cut by the row alone
  rows[3].kv_heads = 6;
  EXPECT_EQ(ShapeOf(90, Precision::kFp8Kv, rows, false).cluster, 0);  // of other numbers of pairs
}

// What a pair's result is made of: its CTA's warps.
TEST(PairsAlone, AreOfShortRowsAndTheSameInAnyBatch) {
  for (const DecodeKernel& kernel : DecodeTable()) {
    const DecodeRow longest = RowOf(4095, 1, 0);  // 3 KV heads
    EXPECT_EQ(PairsAlone(kernel, longest, 8), kernel.sm == 90 ? 3 : 0);
    EXPECT_EQ(PairsAlone(kernel, RowOf(4096, 1, 0), 8), 0);
    if (kernel.sm != 90) continue;
    int32_t warps = 0;
    for (const int32_t rows_count : {1, 50, 1024}) {
      for (const DecodeRow& row : {longest, RowOf(0, 1, 0)}) {
        const std::vector<DecodeRow> rows(rows_count, row);
        const LaunchWork work = WorkOfRows(rows, 8, kernel.grain, false);
        const LaunchShape shape = ShapeOfPairsAlone(kernel, kH200, work);
        EXPECT_LE(kernel.shared_bytes(rows_count, shape), 232448);
        EXPECT_EQ(shape.cluster, 1);
        EXPECT_EQ(shape.ctas, work.pairs);
        if (warps == 0) warps = shape.warps;
        EXPECT_EQ(shape.warps, warps);
      }
    }
  }
}

// A step of rows of one token each, of 8 KV heads.
bool StepShapeOf(const DecodeKernel& kernel, int32_t rows_count, int32_t tokens,
                 LaunchShape* shape) {
  DecodeRow row = RowOf(tokens - 1, 1, 0);
  row.kv_heads = 8;
  const std::vector<DecodeRow> rows(rows_count, row);
  const Grain grain = {kernel.step.unit_tokens, kernel.grain.columns};
  const LaunchWork work = WorkOfRows(rows, 8, grain, false);
  return StepShapeFor(kernel, kH200, work, *shape);
}

TEST(StepShape, FitsTheDeviceAndIsMadeOfPowersOfTwo) {
  for (const DecodeKernel& kernel : DecodeTable()) {
    EXPECT_EQ(kernel.step.kernel != nullptr, kernel.sm == 90 && kernel.grain.columns == 8);
    if (kernel.step.kernel == nullptr) continue;
    for (const int32_t tokens : {1, 77, 1024, 4096}) {
      for (const int32_t rows_count : {1, 2, 8, 64, 1024}) {
        LaunchShape shape{};
        ASSERT_TRUE(StepShapeOf(kernel, rows_count, tokens, &shape));
        EXPECT_LE(kernel.step.shared_bytes(shape), 232448);
        EXPECT_TRUE(std::has_single_bit(static_cast<uint32_t>(shape.warps)));
        EXPECT_TRUE(std::has_single_bit(static_cast<uint32_t>(shape.cluster)));
        EXPECT_LE(shape.warps, kernel.warps_max);
        EXPECT_GE(shape.stages, 1);
        EXPECT_EQ(shape.row_pairs, 8);
      }
    }
  }
}

TEST(StepShape, IsForShortWorkOfEquallyManyPairsARow) {
  const DecodeKernel& kernel = *FindDecodeKernel(90, Precision::kFp8Kv, 128, 8);
  LaunchShape shape{};
  EXPECT_FALSE(StepShapeOf(kernel, 64, 65536, &shape));
  EXPECT_FALSE(StepShapeOf(kernel, 1, 65536, &shape));
  std::vector<DecodeRow> rows(64, RowOf(99, 1, 0));
  const auto has_shape = [&] {
    const LaunchWork work = WorkOfRows(rows, 8, {kernel.step.unit_tokens, 8}, false);
    return StepShapeFor(kernel, kH200, work, shape);
  };
  EXPECT_TRUE(has_shape());
  rows[1].pos = 8191;  // one CTA would work while all others are done
  EXPECT_FALSE(has_shape());
  rows[1] = RowOf(99, 1, 0);
  rows[1].kv_heads = 6;
  EXPECT_FALSE(has_shape());
}

TEST(StepShape, ClustersOfMoreThanTwoTakeHalfOfTheMultiprocessors) {
  const DecodeKernel& kernel = *FindDecodeKernel(90, Precision::kFp8Kv, 128, 8);
  LaunchShape shape{};
  for (const auto& [tokens, cluster] :
       {std::pair(256, 1), {512, 2}, {544, 4}, {1024, 4}, {2016, 4}, {2048, 8}}) {
    ASSERT_TRUE(StepShapeOf(kernel, 1, tokens, &shape));
    EXPECT_EQ(shape.cluster, cluster) << tokens;
  }
  ASSERT_TRUE(StepShapeOf(kernel, 2, 8192, &shape));
  EXPECT_EQ(shape.cluster, 4);
  ASSERT_TRUE(StepShapeOf(kernel, 8, 1024, &shape));
  EXPECT_EQ(shape.cluster, 2);
}

// It travels in another order; the kernel makes it again what it was.
TEST(NearStepRows, OfARowAloneGiveItBack) {
  const auto at = [](uintptr_t address) { return reinterpret_cast<uint16_t*>(address); };
  DecodeRow decode{};
  decode.q = at(0x100);
  decode.out = at(0x200);
  decode.lse = reinterpret_cast<float*>(at(0x300));
  decode.sink_logits = reinterpret_cast<const float*>(at(0x400));
  decode.block_table = reinterpret_cast<const int32_t*>(at(0x500));
  decode.base = reinterpret_cast<const uint8_t*>(at(0x600));
  decode.page_stride = 700;
  decode.pos = 8;
  decode.q_len = 1;
  decode.kv_heads = 9;
  decode.window = 10;
  decode.sm_scale = 0.25F;
  decode.softcap = 30.0F;
  const StepRow row = {decode, at(0x700), at(0x800)};
  const StepRow back = NearStepRows<1>(row).At(0);
  const auto bytes_of = [](const StepRow& step) {
    return std::string(reinterpret_cast<const char*>(&step), sizeof(step));
  };
  EXPECT_EQ(bytes_of(row), bytes_of(back));
}

// "sm head_dim columns precision" of each instantiation in a folder of inst/.
std::set<std::string> Instantiations(const std::string& sm) {
  std::set<std::string> found;
  const std::regex line("template struct Decode<Precision::(\\w+), (\\d+), (\\d+)>;");
  for (const auto& entry :
       std::filesystem::directory_iterator("kernels/cuda/sm" + sm + "/decode/inst")) {
    std::ifstream file(entry.path());
    for (std::string text; std::getline(file, text);) {
      std::smatch match;
      if (!std::regex_match(text, match, line)) continue;
      found.insert(sm + " " + match[2].str() + " " + match[3].str() + " " + match[1].str());
    }
  }
  return found;
}

TEST(DecodeTable, NamesEveryInstantiationAndNoOther) {
  std::set<std::string> in_table;
  for (const DecodeKernel& kernel : DecodeTable()) {
    in_table.insert(std::to_string(kernel.sm) + " " + std::to_string(kernel.head_dim) + " " +
                    std::to_string(kernel.grain.columns) +
                    (kernel.precision == Precision::kFp8Kv ? " kFp8Kv" : " kBf16"));
  }
  std::set<std::string> in_folders = Instantiations("80");
  in_folders.merge(Instantiations("90"));
  EXPECT_EQ(in_table, in_folders);
}

TEST(DecodeTable, HasAKernelForEveryHeadDimAndGroup) {
  for (const int32_t sm : {80, 90}) {
    for (const int32_t head_dim : kHeadDims) {
      for (int32_t group = 1; group <= kGroupMax; ++group) {
        const DecodeKernel* kernel = FindDecodeKernel(sm, Precision::kFp8Kv, head_dim, group);
        ASSERT_NE(kernel, nullptr);
        EXPECT_GE(kernel->grain.columns, group);
      }
    }
  }
  EXPECT_EQ(FindDecodeKernel(90, Precision::kFp8Kv, 72, 8), nullptr);
}

TEST(DecodeTable, HasWarpgroupsForOneBlockOf32ColumnsAlone) {
  const auto workers = [](Precision precision, int32_t columns) {
    return FindDecodeKernel(90, precision, 128, columns)->workers_max;
  };
  EXPECT_EQ(workers(Precision::kFp8Kv, 16), 8);
  EXPECT_EQ(workers(Precision::kFp8Kv, 17), 3);
  EXPECT_EQ(workers(Precision::kFp8Kv, 32), 3);
  EXPECT_EQ(workers(Precision::kFp8Kv, 33), 8);
  EXPECT_EQ(workers(Precision::kBf16, 32), 8);
}

}  // namespace
}  // namespace fp8kvd::kernels::cuda
