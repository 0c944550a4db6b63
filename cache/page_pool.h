// cache/page_pool.h: hands out page ids, counts how many block tables own each, and keeps the
// arithmetic of reservations.
//
// Promises: Alloc gives every page asked for, or none. Same calls, same ids; the page that has been
//   free longest goes out first, so that one launch seldom takes what it gave back itself. Between
//   two calls, pages_free() + pages_used() == pages_total().
// Reservations. A block table claims the page numbers that its sequence may still write. A claim
//   needs a page that nobody else keeps: claims on page numbers without a page need one each; a
//   page that k of its owners claim needs k - 1 copies if all owners claim it (the last one keeps
//   it), else k. The sum over the pool is pages_reserved():
//       pages_reserved() = claims - pages whose every owner claims them
//   While pages_reserved() <= pages_free(), all claims can be met in any order. pages_unreserved()
//   is what is left for everyone else; block_table.h and seq_store.h never take more.
// Does not manage: the bytes of a page (kernels/); which sequence owns it (block_table.h); whether
//   a launch still reads it (the engine queues all byte work in one order, so reuse comes after).
// Threads: one caller at a time, no locks. Cost: O(1) per page, 12 bytes a page, no allocation once
//   constructed.
// Errors: RESOURCE_EXHAUSTED when pages lack. Dropping an owner of a free page is a bug: aborts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "cache/ids.h"

namespace fp8kvd::cache {

class PagePool {
 public:
  // pages_total: 1 .. kPagesMax. on_page_freed (may be empty) is told of every page that gets free.
  explicit PagePool(int64_t pages_total, std::function<void(PageId)> on_page_freed = nullptr);

  absl::Status Alloc(absl::Span<PageId> page_ids);  // one owner each, no claim
  // Undoes the latest Alloc: same pages, still with one owner each.
  void Unalloc(absl::Span<const PageId> page_ids);
  void AddOwner(PageId page_id);   // page_id is used
  bool DropOwner(PageId page_id);  // true: that was the last, the page is free

  // One of the page's owners claims it, or gives the claim up.
  void AddClaim(PageId page_id);
  void DropClaim(PageId page_id);
  // Claims on page numbers that hold no page yet.
  void AddOpenClaims(int64_t claims) { claims_total_ += claims; }
  void DropOpenClaims(int64_t claims);

  uint32_t owners(PageId page_id) const { return pages_[Index(page_id)].owners; }
  uint32_t claims(PageId page_id) const { return pages_[Index(page_id)].claims; }
  int64_t pages_total() const { return static_cast<int64_t>(pages_.size()); }
  int64_t pages_free() const { return pages_free_; }
  int64_t pages_used() const { return pages_total() - pages_free(); }
  int64_t pages_reserved() const { return claims_total_ - pages_covered_; }
  // Pages that sequences gave up because a window had passed them, so far.
  void CountEviction() { ++evictions_total_; }
  int64_t evictions_total() const { return evictions_total_; }
  int64_t pages_unreserved() const { return pages_free() - pages_reserved(); }

 private:
  struct Page {
    uint32_t owners = 0;
    uint32_t claims = 0;  // <= owners
    bool covered() const { return owners > 0 && owners == claims; }
  };
  size_t Index(PageId page_id) const;
  void Change(PageId page_id, int32_t owners, int32_t claims);

  std::vector<Page> pages_;
  std::vector<PageId> free_;  // a ring of pages_free_ ids from free_begin_ on
  size_t free_begin_ = 0;
  int64_t pages_free_ = 0;
  int64_t claims_total_ = 0;
  int64_t evictions_total_ = 0;
  int64_t pages_covered_ = 0;  // pages with covered()
  std::function<void(PageId)> on_page_freed_;
};

}  // namespace fp8kvd::cache
