#include "cache/page_pool.h"

#include <vector>

#include "gtest/gtest.h"

namespace fp8kvd::cache {
namespace {

std::vector<PageId> Alloc(PagePool& pool, size_t count) {
  std::vector<PageId> page_ids(count, kNoPage);
  EXPECT_TRUE(pool.Alloc(absl::MakeSpan(page_ids)).ok());
  return page_ids;
}

TEST(PagePool, AllocGivesEveryPageAskedForOrNone) {
  PagePool pool(3);
  Alloc(pool, 2);
  std::vector<PageId> page_ids(2);
  EXPECT_EQ(pool.Alloc(absl::MakeSpan(page_ids)).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(pool.pages_free(), 1);
}

TEST(PagePool, SameCallsGiveTheSameIds) {
  PagePool a(8);
  PagePool b(8);
  for (PagePool* pool : {&a, &b}) pool->DropOwner(Alloc(*pool, 3)[1]);
  EXPECT_EQ(Alloc(a, 4), Alloc(b, 4));
}

TEST(PagePool, ThePageFreeLongestGoesOutFirst) {
  PagePool pool(4);
  const std::vector<PageId> page_ids = Alloc(pool, 2);
  pool.DropOwner(page_ids[0]);
  EXPECT_EQ(Alloc(pool, 3), (std::vector<PageId>{PageId{2}, PageId{3}, page_ids[0]}));
}

TEST(PagePool, UnallocGivesTheSameIdsOutAgain) {
  PagePool pool(4);
  pool.DropOwner(Alloc(pool, 2)[1]);
  const std::vector<PageId> page_ids = Alloc(pool, 2);
  pool.Unalloc(page_ids);
  EXPECT_EQ(pool.pages_free(), 3);
  EXPECT_EQ(Alloc(pool, 2), page_ids);
}

TEST(PagePool, APageIsFreeOnlyWhenItsLastOwnerDropsIt) {
  PagePool pool(2);
  const PageId page_id = Alloc(pool, 1)[0];
  pool.AddOwner(page_id);
  EXPECT_FALSE(pool.DropOwner(page_id));
  EXPECT_EQ(pool.pages_used(), 1);
  EXPECT_TRUE(pool.DropOwner(page_id));
  EXPECT_EQ(pool.pages_free(), 2);
}

TEST(PagePool, TellsOfEveryPageThatBecomesFree) {
  std::vector<PageId> freed;
  PagePool pool(2, [&](PageId page_id) { freed.push_back(page_id); });
  const PageId page_id = Alloc(pool, 1)[0];
  pool.DropOwner(page_id);
  EXPECT_EQ(freed, std::vector<PageId>{page_id});
}

TEST(PagePoolDeath, AFreePageDroppedTwiceIsABug) {
  PagePool pool(2);
  const PageId page_id = Alloc(pool, 1)[0];
  pool.DropOwner(page_id);
  EXPECT_DEATH(pool.DropOwner(page_id), "bug");
}

TEST(Reservation, APageThatAllOwnersClaimNeedsACopyForAllButOne) {
  PagePool pool(8);
  const PageId page_id = Alloc(pool, 1)[0];
  for (int i = 0; i < 2; ++i) pool.AddOwner(page_id);
  for (int i = 0; i < 3; ++i) pool.AddClaim(page_id);
  EXPECT_EQ(pool.pages_reserved(), 2);
}

TEST(Reservation, APageThatAnOwnerKeepsUnclaimedNeedsACopyForEveryClaim) {
  PagePool pool(8);
  const PageId page_id = Alloc(pool, 1)[0];
  for (int i = 0; i < 2; ++i) pool.AddOwner(page_id);
  for (int i = 0; i < 2; ++i) pool.AddClaim(page_id);
  EXPECT_EQ(pool.pages_reserved(), 2);
  pool.DropOwner(page_id);  // the owner that does not write: one claimant may now keep the page
  EXPECT_EQ(pool.pages_reserved(), 1);
}

TEST(Reservation, OpenClaimsNeedAPageEach) {
  PagePool pool(8);
  pool.AddOpenClaims(5);
  EXPECT_EQ(pool.pages_reserved(), 5);
  EXPECT_EQ(pool.pages_unreserved(), 3);
  pool.DropOpenClaims(2);
  EXPECT_EQ(pool.pages_unreserved(), 5);
}

}  // namespace
}  // namespace fp8kvd::cache
