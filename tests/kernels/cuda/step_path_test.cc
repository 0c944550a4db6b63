// Which way a step's bytes take, and launches of nothing.
#include "kernels/cuda/step_path.h"

#include "gtest/gtest.h"

#include "kernels/cuda/any/append.h"
#include "kernels/cuda/any/copy.h"

namespace fp8kvd::kernels::cuda {
namespace {

// One message of so many items of 64/8 heads, d128.
StepSize Message(int32_t items) {
  StepSize size;
  size.rows = items;
  size.query_ranges = 1;
  size.kv_ranges = 2;
  size.in_bytes = int64_t{items} * (64 + 2 * 8) * 128 * 2;
  size.out_bytes = int64_t{items} * 64 * 128 * 2;
  size.out_ranges = 1;
  return size;
}

TEST(StepPath, AFewItemsGoWithTheLaunches) {
  EXPECT_EQ(PathFor(Message(1), StepLimits{}), StepPath::kNear);
  EXPECT_EQ(PathFor(Message(128), StepLimits{}), StepPath::kNear);
}

TEST(StepPath, NearIsTheAnswerWhereverAreNearSaysSo) {
  EXPECT_TRUE(AreNear(1, StepLimits{}));
  EXPECT_TRUE(AreNear(StepLimits{}.near_rows_max, StepLimits{}));
  EXPECT_FALSE(AreNear(StepLimits{}.near_rows_max + 1, StepLimits{}));
  EXPECT_FALSE(AreNear(0, StepLimits{}));
}

TEST(StepPath, ManyItemsOfOneMessageAreCopied) {
  EXPECT_EQ(PathFor(Message(256), StepLimits{}), StepPath::kCopied);
}

TEST(StepPath, ManyItemsOfManyMessagesGoWithTheLaunches) {
  StepSize size = Message(256);
  size.query_ranges = 256;
  size.kv_ranges = 512;
  EXPECT_EQ(PathFor(size, StepLimits{}), StepPath::kNear);
  StepLimits limits;
  limits.near_rows_max = 0;
  EXPECT_EQ(PathFor(size, limits), StepPath::kFetch);
}

TEST(StepPath, AnAppendAloneIsCopiedWhereItIsLong) {
  StepSize size;
  size.kv_ranges = 2;
  size.in_bytes = int64_t{1} << 20;
  EXPECT_EQ(PathFor(size, StepLimits{}), StepPath::kCopied);
  size.in_bytes = int64_t{4} << 10;
  EXPECT_EQ(PathFor(size, StepLimits{}), StepPath::kFetch);
}

TEST(StepPath, ResultsAreCopiedOutWhereTheyAreManyAndTogether) {
  StepLimits limits;
  limits.out_copy_bytes_min = 1;
  StepSize size = Message(64);
  EXPECT_TRUE(CopiesOut(size, limits));
  size.out_ranges = kCopiesMax + 1;
  EXPECT_FALSE(CopiesOut(size, limits));
  limits.out_copy_bytes_min = size.out_bytes + 1;
  size.out_ranges = 1;
  EXPECT_FALSE(CopiesOut(size, limits));
}

// A device refuses a grid without a CTA, and where there is no device any launch fails.
TEST(Launches, OfNothingLaunchNothing) {
  EXPECT_EQ(LaunchCopyPages(nullptr, 0, 0, nullptr), cudaSuccess);
  EXPECT_EQ(LaunchCopyPages(nullptr, 1, 0, nullptr), cudaSuccess);
  EXPECT_EQ(LaunchTableEdits(nullptr, 0, nullptr), cudaSuccess);
  AppendLaunch nothing;
  nothing.params.head_dim = 128;
  EXPECT_EQ(LaunchAppend(nothing, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace fp8kvd::kernels::cuda
