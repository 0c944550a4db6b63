#include "server/ops/history.h"

#include <array>
#include <cmath>
#include <deque>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fp8kvd::ops {
namespace {

using testing::DoubleEq;
using testing::IsNan;

double ValueOf(const History::Sample& sample, const std::string& series) {
  for (size_t i = 0; i < History::kSeries.size(); ++i) {
    if (series == History::kSeries[i]) return sample.values[i];
  }
  ADD_FAILURE() << "no series " << series;
  return 0;
}

Totals At(int64_t time_ms) {
  Totals totals;
  totals.time_ms = time_ms;
  return totals;
}

TEST(History, RatesAreWhatMovedDividedByTheTimeBetween) {
  History history;
  Totals totals = At(10'000);
  totals.engine.rows_total = 100;
  totals.engine.decode_launches_total = 10;
  totals.calls.received_bytes = 5;
  history.Add(totals);
  EXPECT_TRUE(history.Copy().empty());
  totals.time_ms = 12'000;
  totals.engine.rows_total = 160;
  totals.engine.decode_launches_total = 20;
  totals.engine.seqs = 7;
  totals.calls.received_bytes = 4005;
  history.Add(totals);
  const std::deque<History::Sample> samples = history.Copy();
  ASSERT_EQ(samples.size(), 1U);
  EXPECT_EQ(samples[0].time_ms, 12'000);
  EXPECT_THAT(ValueOf(samples[0], "rows_per_s"), DoubleEq(30));
  EXPECT_THAT(ValueOf(samples[0], "launches_per_s"), DoubleEq(5));
  EXPECT_THAT(ValueOf(samples[0], "batch_rows_mean"), DoubleEq(6));
  EXPECT_THAT(ValueOf(samples[0], "seqs"), DoubleEq(7));
  EXPECT_THAT(ValueOf(samples[0], "received_bytes_per_s"), DoubleEq(2000));
}

TEST(History, LatenciesAreOfTheIntervalAlone) {
  History history;
  Totals totals = At(0);
  for (int i = 0; i < 1000; ++i) totals.engine.queue_us.Observe(100'000);
  history.Add(totals);
  totals.time_ms = 2000;
  for (int i = 0; i < 10; ++i) totals.engine.queue_us.Observe(3);  // in (2, 4]
  history.Add(totals);
  const History::Sample sample = history.Copy()[0];
  EXPECT_THAT(ValueOf(sample, "queue_p50_s"), DoubleEq(3e-6));
  EXPECT_LE(ValueOf(sample, "queue_p99_s"), 4e-6);
}

TEST(History, WhatNobodyObservedIsNotANumber) {
  History history;
  history.Add(At(0));
  history.Add(At(2000));
  const History::Sample sample = history.Copy()[0];
  for (const char* series : {"batch_rows_mean", "call_p99_s", "queue_p50_s", "kernel_p99_s"}) {
    EXPECT_THAT(ValueOf(sample, series), IsNan()) << series;
  }
}

TEST(History, PagesAreTheUsedPartOfAllPools) {
  History history;
  Totals totals = At(0);
  totals.engine.pools = {{.pages_total = 100, .pages_used = 20}, {.pages_total = 300}};
  history.Add(totals);
  totals.time_ms = 2000;
  history.Add(totals);
  EXPECT_THAT(ValueOf(history.Copy()[0], "pages_used_ratio"), DoubleEq(0.05));
}

TEST(History, IsBoundedAndDropsTheOldest) {
  History history;
  for (size_t i = 0; i < History::kSamplesMax + 10; ++i) {
    history.Add(At(static_cast<int64_t>(i) * 2000));
  }
  const std::deque<History::Sample> samples = history.Copy();
  EXPECT_EQ(samples.size(), History::kSamplesMax);
  EXPECT_EQ(samples.front().time_ms, 10 * 2000);
}

TEST(Quantile, IsLinearWithinABucket) {
  const std::array<double, 3> bounds = {1, 2, 4};
  EXPECT_THAT(QuantileOf(0.5, std::array<uint64_t, 4>{0, 0, 10, 0}, bounds), DoubleEq(3));
  EXPECT_THAT(QuantileOf(0.5, std::array<uint64_t, 4>{5, 5, 0, 0}, bounds), DoubleEq(1));
  EXPECT_THAT(QuantileOf(0.99, std::array<uint64_t, 4>{0, 0, 0, 7}, bounds), DoubleEq(4));
  EXPECT_THAT(QuantileOf(0.5, std::array<uint64_t, 4>{0, 0, 0, 0}, bounds), IsNan());
}

}  // namespace
}  // namespace fp8kvd::ops
