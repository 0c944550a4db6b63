// cache/block_table.h: the pages of one sequence in one layer group, by page number: token position
// -> page id and offset. Also holds the sequence's claims on its pool (page_pool.h), which are what
// makes expected_tokens a promise.
//
// Promises: pages [first_page, end_page) are held, each with this table as one owner; those before
//   are reclaimed. Claims stand on exactly
//     no window: page numbers [least committed length / page_tokens, expected pages), none once
//                that length reaches expected_tokens: full pages below are shared for good, only
//                Truncate makes them writable again
//     window:    [first_page, first_page + SeqPagesMax) up to the expected pages: as many pages as
//                the group can hold at once, so that what falls out behind pays for what comes
//                ahead
//   Every change but Truncate and sharing leaves pages_unreserved of the pool the same or larger,
//   apart from pages set outside the claims; for those two, TruncateNeed and ShareNeed say the
//   cost.
// Does not manage: committed lengths (seq_store.h gives the least one of the group's layers).
// Threads: one caller at a time. Cost: O(pages touched); 4 bytes per page number up to pages_max,
//   reserved once, and no allocation after that.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

#include "cache/ids.h"
#include "cache/page_pool.h"

namespace fp8kvd::cache {

class BlockTable {
 public:
  struct Shape {
    int32_t page_tokens = 0;
    int32_t window = 0;
    int32_t reclaim_slack_tokens = 0;
    int64_t seq_len_max = 0;
  };

  BlockTable(const Shape& shape, PagePool* pool);  // pool outlives it

  int64_t first_page() const { return first_page_; }
  int64_t end_page() const { return static_cast<int64_t>(table_.size()); }
  // Pages of [first_page, end_page) in token order.
  absl::Span<const PageId> pages() const;
  PageId page(int64_t page_no) const;  // kNoPage where none is held
  Slot SlotOf(int64_t pos) const;
  bool Claimed(int64_t page_no) const { return claims_.contains(page_no); }
  int64_t open_claims() const;  // claimed page numbers that hold no page

  // Claims that an empty table of so many expected tokens makes, for whoever checks for room first.
  static int64_t ClaimsOfEmpty(const Shape& shape, int64_t expected_tokens);
  // Of an empty table: claims for expected_tokens.
  void Start(int64_t expected_tokens);
  // Of an empty table: owns the parent's pages with it.
  void ShareFrom(const BlockTable& parent, int64_t expected_tokens, int64_t seq_len_min);
  // Of an empty table: holds these pages from page number first_page on, each of which counts the
  // table as an owner already, with claims as they follow from the rest.
  void Adopt(int64_t first_page, absl::Span<const PageId> page_ids, int64_t expected_tokens,
             int64_t seq_len_min);
  // What so many children cost in pages_unreserved.
  int64_t ShareNeed(int64_t children, int64_t expected_tokens, int64_t seq_len_min) const;

  // Drops the pages that lie wholly at or beyond pos; seq_len_min is the least length afterwards.
  void Truncate(int64_t pos, int64_t seq_len_min);
  int64_t TruncateNeed(int64_t pos, int64_t seq_len_min) const;  // in pages_unreserved; may be < 0
  // Drops every page and every claim.
  void Clear();

  // Puts in a page of which the table becomes the owner that Alloc counted; drops the one before.
  // page_no is held or is end_page.
  void Set(int64_t page_no, PageId page_id);
  // Reclaims the pages before page_no; the first `kept` of them that have no other owner are taken
  // out instead and stay used: whoever calls Sets them again.
  void Reclaim(int64_t page_no, int64_t kept);
  // Moves the claims to where first_page and the least committed length want them.
  void MoveClaims(int64_t seq_len_min);
  // Whether page_no will be claimed once the pages before first_page are reclaimed.
  bool ClaimedAfterReclaim(int64_t page_no, int64_t first_page) const;

 private:
  struct Range {
    int64_t begin = 0;
    int64_t end = 0;
    bool contains(int64_t page_no) const { return begin <= page_no && page_no < end; }
  };
  // Where claims stand, by the rule above.
  Range ClaimsAt(int64_t first_page, int64_t seq_len_min, int64_t expected_tokens) const;
  void AddClaims(int64_t begin, int64_t end);
  void DropClaims(int64_t begin, int64_t end);
  void TakeOut(int64_t page_no);  // the owner count stays

  Shape shape_;
  PagePool* pool_;
  std::vector<PageId> table_;  // by page number; kNoPage before first_page_
  int64_t first_page_ = 0;
  int64_t expected_tokens_ = 0;
  Range claims_;
};

}  // namespace fp8kvd::cache
