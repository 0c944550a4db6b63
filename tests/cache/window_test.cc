// Layer groups with a window: reclaim, run-ahead, skip_to, visibility.
#include <string>

#include <gtest/gtest.h>

#include "tests/support/store.h"

namespace fp8kvd::cache {
namespace {

using absl::StatusCode;

bool Names(const absl::Status& status, const std::string& text) {
  return std::string(status.message()).find(text) != std::string::npos;
}

TEST(Window, APageGoesOnlyWhenItsLastTokenIsWindowPlusSlackBehind) {
  Store store(PageTokens(4).Window(8).Slack(2));
  const SeqHandle seq = store.Filled(10);
  // Page 0 ends at 3, and goes when 3 < length - 8 - 2.
  ASSERT_TRUE(store.Append(seq, 3).ok());
  EXPECT_NE(store.PageOf(seq, 0), kNoPage);
  ASSERT_TRUE(store.Append(seq, 1).ok());
  EXPECT_EQ(store.Len(seq), 14);
  EXPECT_EQ(store.PageOf(seq, 0), kNoPage);
  EXPECT_NE(store.PageOf(seq, 4), kNoPage);
}

TEST(Window, TheSlowestLayerOfTheGroupDecides) {
  Store store(PageTokens(4).Window(8).Layers(2));
  const SeqHandle seq = store.Filled(8);
  ASSERT_TRUE(store.Append(seq, 5, 1).ok());
  ASSERT_TRUE(store.Append(seq, 5, 0).ok());
  EXPECT_NE(store.PageOf(seq, 0), kNoPage);
  ASSERT_TRUE(store.Append(seq, 7, 1).ok());
  EXPECT_EQ(store.Pool().pages_used, 3);
}

TEST(Window, ALayerMayNotRunFurtherAheadAndTheErrorNamesTheSlowest) {
  Store store(PageTokens(4).Window(8).Slack(2).Layers(3));
  const SeqHandle seq = store.Create();
  ASSERT_TRUE(store.Append(seq, 5, 0).ok());
  ASSERT_TRUE(store.Append(seq, 3, 2).ok());
  ASSERT_TRUE(store.Append(seq, 4, 1).ok());
  EXPECT_TRUE(store.Append(seq, 8, 0).ok());  // 13 = 3 + 8 + 2
  const absl::Status status = store.Append(seq, 1, 0);
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Names(status, "layer 2 of the same group stands at 3")) << status;
  EXPECT_EQ(store.Len(seq, 0), 13);
}

TEST(Window, BulkAppendsReclaimAsTheyGo) {
  Store store(PageTokens(4).Window(8).Pages(6));
  const SeqHandle seq = store.Create();
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(store.Append(seq, 7).ok()) << i;
  EXPECT_LE(store.Pool().pages_used, 3);
  EXPECT_EQ(store.Pool().evictions_total, 700 / 4 - store.Pool().pages_used);
}

TEST(Window, OneAppendMayBringWindowPlusSlackTokens) {
  Store store(PageTokens(4).Window(8).Slack(2));
  const SeqHandle seq = store.Create();
  EXPECT_EQ(store.Append(seq, 11).code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(store.Append(seq, 10).ok());
}

TEST(Window, TruncateBelowWhatRemainsNamesTheLowestPosition) {
  Store store(PageTokens(4).Window(8));
  const SeqHandle seq = store.Filled(8);
  ASSERT_TRUE(store.Append(seq, 8).ok());  // tokens 0 .. 7 are reclaimed
  const absl::Status status = store.Truncate(seq, 7);
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Names(status, "lowest position possible is 8")) << status;
  EXPECT_EQ(store.Len(seq), 16);
  EXPECT_TRUE(store.Truncate(seq, 8).ok());
  EXPECT_EQ(store.Len(seq), 8);
}

TEST(Window, AQueryThatNeedsWhatIsGoneNamesTheLowestPosition) {
  Store store(PageTokens(4).Window(8).Slack(3));
  const SeqHandle seq = store.Filled(10);
  ASSERT_TRUE(store.Append(seq, 6).ok());  // length 16: tokens 0 .. 3 are reclaimed
  const SeqIndex index = store.At(seq);
  const absl::Status status = store->CheckVisible(index, 0, 10, 1);  // sees 3 .. 10
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Names(status, "lowest position possible is 11")) << status;
  EXPECT_TRUE(store->CheckVisible(index, 0, 11, 5).ok());
}

TEST(Window, AClientMayStepBackByTheSlack) {
  Store store(PageTokens(1).Window(8).Slack(5));
  const SeqHandle seq = store.Filled(13);
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(store.Append(seq, 1).ok());
  // Length 33: the next query of a client that stepped back by 5 stands at 28 - 1.
  EXPECT_TRUE(store->CheckVisible(store.At(seq), 0, 27, 1).ok());
  EXPECT_EQ(store->CheckVisible(store.At(seq), 0, 26, 1).code(), StatusCode::kFailedPrecondition);
}

TEST(Window, AGroupWithoutWindowBesideItKeepsEverything) {
  Store store(PageTokens(4).Window(8).AndGroup());
  const SeqHandle seq = store.Create();
  for (int i = 0; i < 10; ++i) {
    for (const int32_t layer : {0, 1}) ASSERT_TRUE(store.Append(seq, 4, layer).ok());
  }
  EXPECT_EQ(store.Pool(0).pages_used, 2);
  EXPECT_EQ(store.Pool(1).pages_used, 10);
  EXPECT_TRUE(store.Holds(seq, 0, 40, 1, /*layer=*/1));
}

TEST(SkipTo, MakesThePositionsBeforeItCountAsCommittedAndReclaimed) {
  Store store(PageTokens(4).Window(8));
  const SeqHandle seq = store.Create();
  ASSERT_TRUE(store.AppendAt(seq, {.pos = 101, .n = 8, .digest = 3, .skip_to = 101}).ok());
  EXPECT_EQ(store.Len(seq), 109);
  EXPECT_EQ(store.Pool().pages_used, 3);
  EXPECT_TRUE(store.Holds(seq, 101, 109, 3));
  EXPECT_TRUE(store->CheckVisible(store.At(seq), 0, 108, 1).ok());
  EXPECT_TRUE(Names(store->CheckVisible(store.At(seq), 0, 107, 1), "possible is 108"));
  EXPECT_TRUE(Names(store.Truncate(seq, 100), "possible is 101"));
}

TEST(SkipTo, CarriesTheSlowerLayersOfItsGroupAlong) {
  Store store(PageTokens(4).Window(8).Layers(2));
  const SeqHandle seq = store.Create();
  ASSERT_TRUE(store.AppendAt(seq, {.layer = 0, .pos = 100, .n = 8, .skip_to = 100}).ok());
  EXPECT_EQ(store.Len(seq, 1), 100);
  EXPECT_TRUE(store.AppendAt(seq, {.layer = 1, .pos = 100, .n = 8, .skip_to = 100}).ok());
  EXPECT_EQ(store.AppendAt(seq, {.layer = 1, .pos = 0, .n = 8}).status().code(),
            StatusCode::kFailedPrecondition);
}

TEST(SkipTo, DropsThePagesBeforeIt) {
  Store store(PageTokens(4).Window(8));
  const SeqHandle seq = store.Filled(8);
  ASSERT_TRUE(store.AppendAt(seq, {.pos = 50, .n = 4, .digest = 2, .skip_to = 50}).ok());
  EXPECT_EQ(store.Pool().pages_used, 2);
  EXPECT_EQ(store.PageOf(seq, 7), kNoPage);
  EXPECT_TRUE(store.Holds(seq, 50, 54, 2));
}

TEST(SkipTo, InsideAReservationUsesItsOwnPagesWhenThePoolIsFull) {
  Store store(PageTokens(4).Window(8).Pages(5));
  const SeqHandle seq = store.Create(/*expected_tokens=*/200);
  EXPECT_EQ(store.Pool().pages_reserved, 5);  // SeqPagesMax
  ASSERT_TRUE(store.Append(seq, 8).ok());
  ASSERT_TRUE(store.Append(seq, 7).ok());
  ASSERT_EQ(store.Pool().pages_free, 2);  // and 101 .. 108 need three
  ASSERT_TRUE(store.AppendAt(seq, {.pos = 101, .n = 8, .digest = 2, .skip_to = 101}).ok());
  EXPECT_TRUE(store.Holds(seq, 101, 109, 2));
  ASSERT_TRUE(store.Append(seq, 8).ok());
}

TEST(SkipTo, OfAForkLeavesTheParentsTokensAlone) {
  Store store(PageTokens(4).Window(8).Pages(6));
  const SeqHandle parent = store.Filled(8);
  const SeqHandle child = store.Fork(parent);
  ASSERT_TRUE(store.AppendAt(child, {.pos = 40, .n = 8, .digest = 2, .skip_to = 40}).ok());
  EXPECT_TRUE(store.Holds(parent, 0, 8, 1));
  EXPECT_TRUE(store.Holds(child, 40, 48, 2));
}

TEST(WindowReservation, HoldsForeverAndWithEveryLayerAsFarAheadAsItMay) {
  Store store(PageTokens(4).Window(8).Slack(2).Layers(2).Pages(12));
  const SeqHandle seq = store.Create(/*expected_tokens=*/1000);
  const SeqHandle greedy = store.Create();
  while (store.Append(greedy, 1).ok() && store.Len(greedy) < 10) {
  }
  for (int i = 0; i < 90; ++i) {
    const int64_t ahead = store.Len(seq, 1) + 10 - store.Len(seq, 0);
    ASSERT_TRUE(store.Append(seq, ahead, 0).ok()) << i;
    ASSERT_TRUE(store.Append(seq, 7, 1).ok()) << i;
  }
}

TEST(WindowReservation, HoldsForForksThatShareTheirWindow) {
  Store store(PageTokens(4).Window(8).Pages(10));
  const SeqHandle parent = store.Filled(8, /*expected_tokens=*/400);
  const SeqHandle child = store.Fork(parent, /*expected_tokens=*/400);
  EXPECT_EQ(store.TryFork(parent, 400).status().code(), StatusCode::kResourceExhausted);
  for (int i = 0; i < 40; ++i) {
    ASSERT_TRUE(store.Append(parent, 8, 0, 2).ok()) << i;
    ASSERT_TRUE(store.Append(child, 5, 0, 3).ok()) << i;
  }
}

TEST(Window, APlanWhoseQueriesWouldSeeSkippedTokensSaysSo) {
  Store store(PageTokens(4).Window(8));
  const SeqHandle seq = store.Create();
  const SeqIndex index = store.At(seq);
  const auto plan_at = [&](int64_t pos, int64_t skip_to) {
    return *store->PlanAppend(index, {.layer = 0, .pos = pos, .n = 1, .skip_to = skip_to});
  };
  AppendPlan plan = plan_at(20, 20);
  store->Commit(plan);
  for (int64_t pos = 21; pos < 27; ++pos) store->Commit(plan_at(pos, 0));
  plan = plan_at(27, 0);  // sees 20 .. 27
  EXPECT_TRUE(store->CheckPlanVisible(plan).ok());
  store->Abandon(plan);
  ASSERT_TRUE(store->Truncate(index, 26).ok());
  plan = plan_at(26, 0);  // sees 19 .. 26
  EXPECT_EQ(store->CheckPlanVisible(plan).code(), StatusCode::kFailedPrecondition);
  store->Abandon(plan);
}

}  // namespace
}  // namespace fp8kvd::cache
