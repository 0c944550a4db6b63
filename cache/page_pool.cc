#include "cache/page_pool.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "config/base/check.h"

namespace fp8kvd::cache {

PagePool::PagePool(int64_t pages_total, std::function<void(PageId)> on_page_freed)
    : pages_(static_cast<size_t>(pages_total)),
      pages_free_(pages_total),
      on_page_freed_(std::move(on_page_freed)) {
  free_.reserve(pages_.size());
  for (int64_t id = 0; id < pages_total; ++id) free_.push_back(static_cast<PageId>(id));
}

size_t PagePool::Index(PageId page_id) const {
  const auto index = static_cast<size_t>(page_id);
  FP8KVD_CHECK(index < pages_.size());
  return index;
}

void PagePool::Change(PageId page_id, int32_t owners, int32_t claims) {
  Page& page = pages_[Index(page_id)];
  pages_covered_ -= page.covered() ? 1 : 0;
  page.owners += static_cast<uint32_t>(owners);
  page.claims += static_cast<uint32_t>(claims);
  claims_total_ += claims;
  FP8KVD_CHECK(page.claims <= page.owners);
  pages_covered_ += page.covered() ? 1 : 0;
}

absl::Status PagePool::Alloc(absl::Span<PageId> page_ids) {
  if (static_cast<int64_t>(page_ids.size()) > pages_free_) {
    return absl::ResourceExhaustedError(absl::StrCat(page_ids.size(), " pages asked, ", pages_free_,
                                                     " of ", pages_total(),
                                                     " are free; free sequences or retry later"));
  }
  for (PageId& page_id : page_ids) {
    page_id = free_[free_begin_];
    free_begin_ = (free_begin_ + 1) % free_.size();
    --pages_free_;
    Change(page_id, 1, 0);
  }
  return absl::OkStatus();
}

void PagePool::Unalloc(absl::Span<const PageId> page_ids) {
  for (size_t i = page_ids.size(); i-- > 0;) {
    FP8KVD_CHECK(owners(page_ids[i]) == 1 && claims(page_ids[i]) == 0);
    Change(page_ids[i], -1, 0);
    free_begin_ = (free_begin_ + free_.size() - 1) % free_.size();
    free_[free_begin_] = page_ids[i];
    ++pages_free_;
  }
}

void PagePool::AddOwner(PageId page_id) {
  FP8KVD_CHECK(owners(page_id) > 0);
  Change(page_id, 1, 0);
}

bool PagePool::DropOwner(PageId page_id) {
  FP8KVD_CHECK(owners(page_id) > 0);
  Change(page_id, -1, 0);
  if (owners(page_id) > 0) return false;
  free_[(free_begin_ + static_cast<size_t>(pages_free_)) % free_.size()] = page_id;
  ++pages_free_;
  if (on_page_freed_) on_page_freed_(page_id);
  return true;
}

void PagePool::AddClaim(PageId page_id) {
  FP8KVD_CHECK(owners(page_id) > 0);
  Change(page_id, 0, 1);
}

void PagePool::DropClaim(PageId page_id) {
  FP8KVD_CHECK(claims(page_id) > 0);
  Change(page_id, 0, -1);
}

void PagePool::DropOpenClaims(int64_t claims) {
  claims_total_ -= claims;
  FP8KVD_CHECK(claims_total_ >= 0);
}

}  // namespace fp8kvd::cache
