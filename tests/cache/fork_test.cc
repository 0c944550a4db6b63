// Sharing, copy-on-write, and what a reservation promises beside them.
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/store.h"

namespace fp8kvd::cache {
namespace {

using absl::StatusCode;

TEST(Fork, SharesEveryPage) {
  Store store(PageTokens(4));
  const SeqHandle parent = store.Filled(6);
  const SeqHandle child = store.Fork(parent);
  EXPECT_EQ(store.Pool().pages_used, 2);
  EXPECT_EQ(store.PageOf(child, 5), store.PageOf(parent, 5));
  EXPECT_TRUE(store.Holds(child, 0, 6, 1));
}

TEST(Fork, AppendToTheChildGivesItATailPageOfItsOwn) {
  Store store(PageTokens(4));
  const SeqHandle parent = store.Filled(6);  // one full page, one half-filled
  const SeqHandle child = store.Fork(parent);
  ASSERT_TRUE(store.Append(child, 1, 0, /*digest=*/2).ok());
  EXPECT_NE(store.TailPage(child), store.TailPage(parent));
  EXPECT_TRUE(store.Holds(child, 0, 6, 1));
  EXPECT_TRUE(store.Holds(child, 6, 7, 2));
}

TEST(Fork, AppendToTheParentLeavesTheChildsTailAlone) {
  Store store(PageTokens(4));
  const SeqHandle parent = store.Filled(6);
  const SeqHandle child = store.Fork(parent);
  ASSERT_TRUE(store.Append(parent, 2, 0, 2).ok());
  ASSERT_TRUE(store.Append(child, 2, 0, 3).ok());
  EXPECT_TRUE(store.Holds(parent, 6, 8, 2));
  EXPECT_TRUE(store.Holds(child, 6, 8, 3));
}

TEST(Fork, TheFirstLayerThatWritesCopiesThePageForAll) {
  Store store(PageTokens(4).Layers(3));
  const SeqHandle parent = store.Create();
  for (int32_t layer = 0; layer < 3; ++layer) {
    ASSERT_TRUE(store.Append(parent, 6, layer, static_cast<uint64_t>(10 + layer)).ok());
  }
  const SeqHandle child = store.Fork(parent);
  ASSERT_TRUE(store.Append(child, 1, /*layer=*/1, 2).ok());
  EXPECT_EQ(store.Pool().pages_used, 3);
  ASSERT_TRUE(store.Append(child, 1, /*layer=*/0, 2).ok());
  EXPECT_EQ(store.Pool().pages_used, 3);
  for (int32_t layer = 0; layer < 3; ++layer) {
    EXPECT_TRUE(store.Holds(child, 0, 6, static_cast<uint64_t>(10 + layer), layer)) << layer;
  }
}

TEST(Fork, AFullPageIsCopiedWhenASlowerLayerStillHasToWriteIt) {
  Store store(PageTokens(4).Layers(2));
  const SeqHandle parent = store.Filled(8);
  const SeqHandle child = store.Fork(parent);
  ASSERT_TRUE(store.Append(child, 8, /*layer=*/1, 2).ok());
  EXPECT_NE(store.PageOf(child, 0), store.PageOf(parent, 0));
  EXPECT_TRUE(store.Holds(child, 0, 8, 1, 0));
}

TEST(Fork, TheLastOwnerWritesInPlace) {
  Store store(PageTokens(4));
  const SeqHandle parent = store.Filled(6);
  const SeqHandle child = store.Fork(parent);
  const PageId tail = store.TailPage(parent);
  store.Free(parent);
  ASSERT_TRUE(store.Append(child, 1).ok());
  EXPECT_EQ(store.TailPage(child), tail);
}

TEST(Fork, KnowsTheDigestsOfItsParent) {
  Store store(PageTokens(4));
  const SeqHandle child = store.Fork(store.Filled(6));
  EXPECT_EQ(store.AppendAt(child, {.pos = 0, .n = 6, .digest = 1}).value(), AppendVerdict::kReplay);
}

TEST(Fork, OfAForkFreedInAnyOrderGivesEveryPageBack) {
  for (int first = 0; first < 3; ++first) {
    Store store(PageTokens(4));
    std::vector<SeqHandle> seqs = {store.Filled(6)};
    seqs.push_back(store.Fork(seqs[0]));
    ASSERT_TRUE(store.Append(seqs[1], 5).ok());
    seqs.push_back(store.Fork(seqs[1], 20));
    for (int i = 0; i < 3; ++i) store.Free(seqs[static_cast<size_t>((first + i) % 3)]);
    EXPECT_EQ(store.Pool().pages_used, 0);
    EXPECT_EQ(store.Pool().pages_reserved, 0);
  }
}

TEST(Truncate, DropsPagesAndLetsTheSamePositionsBeWrittenAnew) {
  Store store(PageTokens(4).Layers(2));
  const SeqHandle seq = store.Filled(10);
  ASSERT_TRUE(store.Append(seq, 10, 1).ok());
  ASSERT_TRUE(store.Truncate(seq, 5).ok());
  EXPECT_EQ(store.Len(seq, 0), 5);
  EXPECT_EQ(store.Len(seq, 1), 5);
  EXPECT_EQ(store.Pool().pages_used, 2);
  ASSERT_TRUE(store.Append(seq, 3, 0, 2).ok());
  EXPECT_TRUE(store.Holds(seq, 0, 5, 1));
  EXPECT_TRUE(store.Holds(seq, 5, 8, 2));
}

TEST(Truncate, OfAForkLeavesTheParentAlone) {
  Store store(PageTokens(4));
  const SeqHandle parent = store.Filled(10);
  const SeqHandle child = store.Fork(parent);
  ASSERT_TRUE(store.Truncate(child, 3).ok());
  ASSERT_TRUE(store.Append(child, 6, 0, 2).ok());
  EXPECT_TRUE(store.Holds(parent, 0, 10, 1));
  EXPECT_TRUE(store.Holds(child, 3, 9, 2));
}

TEST(Truncate, BeyondTheEndChangesNothing) {
  Store store(PageTokens(4));
  const SeqHandle seq = store.Filled(6);
  EXPECT_TRUE(store.Truncate(seq, 600).ok());
  EXPECT_EQ(store.Len(seq), 6);
  EXPECT_EQ(store.Truncate(seq, -1).code(), StatusCode::kInvalidArgument);
}

TEST(Pool, AFullPoolAnswersAtOnceAndChangesNothing) {
  Store store(PageTokens(4).Pages(2));
  const SeqHandle seq = store.Filled(7);
  EXPECT_EQ(store.Append(seq, 2).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(store.Len(seq), 7);
  EXPECT_TRUE(store.Append(seq, 1).ok());
}

TEST(Pool, AtExactlyOneHundredPercentWithSharedPrefixesNoSharedPageIsHandedOut) {
  Store store(PageTokens(4).Pages(3));
  const SeqHandle parent = store.Filled(10);  // all three pages
  const SeqHandle child = store.Fork(parent);
  EXPECT_EQ(store.Append(child, 1, 0, 2).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(store.Append(parent, 1, 0, 2).code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(store.Holds(parent, 0, 10, 1));
  store.Free(parent);
  ASSERT_TRUE(store.Append(child, 2, 0, 2).ok());
  EXPECT_TRUE(store.Holds(child, 0, 10, 1));
  EXPECT_TRUE(store.Holds(child, 10, 12, 2));
}

TEST(Reservation, AppendsInsideItNeverFailForRoom) {
  Store store(PageTokens(4).Pages(8));
  const SeqHandle reserved = store.Create(/*expected_tokens=*/16);
  const SeqHandle greedy = store.Create();
  EXPECT_TRUE(store.Append(greedy, 16).ok());
  EXPECT_EQ(store.Append(greedy, 1).code(), StatusCode::kResourceExhausted);
  for (int i = 0; i < 16; ++i) EXPECT_TRUE(store.Append(reserved, 1).ok()) << i;
  EXPECT_EQ(store.Append(reserved, 1).code(), StatusCode::kResourceExhausted);
}

TEST(Reservation, HoldsAfterTruncate) {
  Store store(PageTokens(4).Pages(8));
  const SeqHandle reserved = store.Filled(16, /*expected_tokens=*/16);
  ASSERT_TRUE(store.Truncate(reserved, 2).ok());
  const SeqHandle greedy = store.Filled(16);
  EXPECT_EQ(store.Append(greedy, 1).code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(store.Append(reserved, 14).ok());
}

TEST(Reservation, IncludesTheCopiesOfForks) {
  Store store(PageTokens(4).Pages(5));
  const SeqHandle parent = store.Filled(6, /*expected_tokens=*/8);
  const SeqHandle child = store.Fork(parent, /*expected_tokens=*/8);
  EXPECT_EQ(store.Pool().pages_reserved, 1);     // a copy of the tail: the last writer keeps it
  ASSERT_TRUE(store.Filled(8).generation != 0);  // the rest of the pool
  EXPECT_TRUE(store.Append(parent, 2, 0, 2).ok());
  EXPECT_TRUE(store.Append(child, 2, 0, 3).ok());
  EXPECT_TRUE(store.Holds(parent, 6, 8, 2));
  EXPECT_TRUE(store.Holds(child, 6, 8, 3));
}

TEST(Reservation, OfTheParentSurvivesAForkThatReservesNothing) {
  Store store(PageTokens(4).Pages(3));
  const SeqHandle parent = store.Filled(6, /*expected_tokens=*/8);
  const SeqHandle child = store.Fork(parent);
  EXPECT_EQ(store.Append(child, 1, 0, 3).code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(store.Append(parent, 1, 0, 2).ok());
  EXPECT_TRUE(store.Append(child, 1, 0, 3).ok());  // now the last owner of its tail
}

TEST(Reservation, AForkThatWouldBreakAnothersIsRefused) {
  Store store(PageTokens(4).Pages(2));
  const SeqHandle parent = store.Filled(6, /*expected_tokens=*/8);
  EXPECT_EQ(store.TryFork(parent).status().code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(store.Append(parent, 2).ok());
  EXPECT_TRUE(store.TryFork(parent).ok());  // nothing left to copy
}

TEST(Reservation, ATruncateThatWouldBreakItIsRefused) {
  Store store(PageTokens(4).Pages(4));
  const SeqHandle parent = store.Filled(16, /*expected_tokens=*/16);
  const SeqHandle child = store.Fork(parent);
  EXPECT_EQ(store.Truncate(parent, 4).code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(store.Holds(parent, 0, 16, 1));
  store.Free(child);
  ASSERT_TRUE(store.Truncate(parent, 4).ok());
  EXPECT_TRUE(store.Append(parent, 12).ok());
}

TEST(Reservation, SharedFullPagesCostAForkNothing) {
  Store store(PageTokens(4).Pages(9));
  const SeqHandle parent = store.Filled(16, /*expected_tokens=*/20);
  for (int i = 0; i < 4; ++i) store.Fork(parent, /*expected_tokens=*/20);
  EXPECT_EQ(store.Pool().pages_used, 4);
  EXPECT_EQ(store.Pool().pages_reserved, 5);
}

}  // namespace
}  // namespace fp8kvd::cache
