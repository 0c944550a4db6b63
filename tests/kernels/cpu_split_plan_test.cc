#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/cpu/split_plan.h"

namespace fp8kvd::kernels::cpu {
namespace {

DecodeRow MakeRow(int32_t seq_len, int32_t kv_heads, int32_t q_len = 1, int32_t window = 0) {
  DecodeRow row{};
  row.pos = seq_len - q_len;
  row.q_len = q_len;
  row.kv_heads = kv_heads;
  row.window = window;
  return row;
}

// A plan for some rows, and the rows.
struct Planned {
  Planned(std::vector<DecodeRow> launch_rows, int32_t threads) : rows(std::move(launch_rows)) {
    params.rows = rows.data();
    params.rows_count = static_cast<int32_t>(rows.size());
    params.head_dim = 128;
    params.group = 4;
    plan.Reserve(params.rows_count);
    plan.Make(params, threads);
  }
  std::vector<DecodeRow> rows;
  DecodeParams params{};
  SplitPlan plan;
};

std::vector<DecodeRow> ManyRows() {
  std::vector<DecodeRow> rows;
  for (int32_t i = 0; i < 60; ++i) {
    rows.push_back(MakeRow(i * i * 7 % 5000, 1 + i % 3, 1, i % 4 == 0 ? 300 : 0));
  }
  return rows;
}

TEST(SplitPlan, EverySplitOfEveryUnitBelongsToExactlyOneThread) {
  for (const int32_t threads : {1, 2, 3, 8, 64}) {
    const Planned planned(ManyRows(), threads);
    std::map<std::tuple<int32_t, int32_t, int32_t>, int> times;
    for (int32_t thread = 0; thread < planned.plan.threads(); ++thread) {
      planned.plan.ForEachPart(thread, planned.params, [&](const UnitPart& part) {
        for (int32_t split = part.begin; split < part.end; ++split) {
          ++times[{part.row, part.kv_head, split}];
        }
      });
    }
    size_t splits = 0;
    for (size_t i = 0; i < planned.rows.size(); ++i) {
      splits +=
          size_t{1} * planned.plan.row(static_cast<int32_t>(i)).splits * planned.rows[i].kv_heads;
    }
    EXPECT_EQ(times.size(), splits);
    for (const auto& [split, count] : times) EXPECT_EQ(count, 1);
  }
}

TEST(SplitPlan, AThreadBeginsAtMostOneCutUnitAndAllNameItAsTheOwner) {
  for (const int32_t threads : {2, 3, 8, 64}) {
    const Planned planned({MakeRow(9000, 2), MakeRow(100, 1), MakeRow(20000, 1)}, threads);
    std::map<std::pair<int32_t, int32_t>, int32_t> owner_of;
    for (int32_t thread = 0; thread < planned.plan.threads(); ++thread) {
      int32_t begun = 0;
      planned.plan.ForEachPart(thread, planned.params, [&](const UnitPart& part) {
        if (part.whole) return;
        if (part.begin == 0) {
          ++begun;
          EXPECT_EQ(part.owner, thread);
          owner_of[{part.row, part.kv_head}] = thread;
        }
        const auto owner = owner_of.find({part.row, part.kv_head});
        ASSERT_NE(owner, owner_of.end()) << "a later thread holds the first split";
        EXPECT_EQ(part.owner, owner->second);
      });
      EXPECT_LE(begun, 1);
    }
  }
}

TEST(SplitPlan, SplitsCoverTheVisiblePagesOfALongRow) {
  const Planned planned({MakeRow(8192, 1)}, 2);
  const RowSplits& row = planned.plan.row(0);
  EXPECT_EQ(row.first_page, 0);
  EXPECT_EQ(row.end_page, 128);
  EXPECT_EQ(row.splits, 32);
  EXPECT_EQ(row.split_pages, 4);
}

TEST(SplitPlan, AWindowLeavesOutThePagesBeforeIt) {
  const Planned planned({MakeRow(1000, 1, /*q_len=*/3, /*window=*/100)}, 1);
  EXPECT_EQ(planned.plan.row(0).first_page, (997 - 99) / 64);
  EXPECT_EQ(planned.plan.row(0).end_page, 16);
}

TEST(SplitPlan, SplitsNeverExceedTheirBound) {
  for (const int32_t length : {1, 64, 2048, 2049, 8193, 131072, 1 << 24}) {
    const Planned planned({MakeRow(length, 1)}, 4);
    EXPECT_LE(planned.plan.row(0).splits, kSplitsMax) << length;
    EXPECT_GE(planned.plan.row(0).splits, 1) << length;
  }
}

TEST(SplitPlan, AQueryThatSeesNoKeyIsOneEmptySplit) {
  const Planned planned({MakeRow(0, 1)}, 1);
  EXPECT_EQ(planned.plan.row(0).splits, 1);
  EXPECT_EQ(planned.plan.row(0).first_page, planned.plan.row(0).end_page);
}

TEST(SplitPlan, ASmallLaunchWakesNobodyAndALargeOneEverybody) {
  EXPECT_EQ(Planned({MakeRow(64, 2)}, 8).plan.threads(), 1);
  EXPECT_EQ(Planned({MakeRow(8192, 8)}, 8).plan.threads(), 8);
}

// The most and the least that a thread does differ by less than one split of the longest row.
TEST(SplitPlan, ThreadsHaveEqualSharesWithinASplit) {
  const Planned planned({MakeRow(8192, 3)}, 2);
  std::vector<int32_t> splits(2, 0);
  for (int32_t thread = 0; thread < 2; ++thread) {
    planned.plan.ForEachPart(thread, planned.params, [&](const UnitPart& part) {
      splits[thread] += part.end - part.begin;
    });
  }
  EXPECT_EQ(splits[0] + splits[1], 96);
  EXPECT_LE(std::abs(splits[0] - splits[1]), 1);
}

}  // namespace
}  // namespace fp8kvd::kernels::cpu
