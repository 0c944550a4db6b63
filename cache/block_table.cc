#include "cache/block_table.h"

#include <algorithm>

#include "config/base/check.h"
#include "config/base/geometry.h"

namespace fp8kvd::cache {
namespace {

int64_t PagesOf(int64_t tokens, int32_t page_tokens) {
  return (tokens + page_tokens - 1) / page_tokens;
}

// Pages beside itself that a page's claims need (page_pool.h).
int64_t NeedOf(int64_t owners, int64_t claims) {
  return claims - (owners > 0 && owners == claims ? 1 : 0);
}

}  // namespace

BlockTable::BlockTable(const Shape& shape, PagePool* pool) : shape_(shape), pool_(pool) {
  table_.reserve(static_cast<size_t>(PagesOf(shape.seq_len_max, shape.page_tokens)));
}

absl::Span<const PageId> BlockTable::pages() const {
  return absl::MakeConstSpan(table_).subspan(static_cast<size_t>(first_page_));
}

PageId BlockTable::page(int64_t page_no) const {
  if (page_no < first_page_ || page_no >= end_page()) return kNoPage;
  return table_[static_cast<size_t>(page_no)];
}

Slot BlockTable::SlotOf(int64_t pos) const {
  return {.page_id = page(pos / shape_.page_tokens),
          .offset = static_cast<int32_t>(pos % shape_.page_tokens)};
}

int64_t BlockTable::open_claims() const {
  const int64_t held_begin = std::max(claims_.begin, first_page_);
  const int64_t held_end = std::min(claims_.end, end_page());
  return claims_.end - claims_.begin - std::max<int64_t>(0, held_end - held_begin);
}

int64_t BlockTable::ClaimsOfEmpty(const Shape& shape, int64_t expected_tokens) {
  return SeqPagesMax(expected_tokens, shape.window, shape.reclaim_slack_tokens, shape.page_tokens);
}

BlockTable::Range BlockTable::ClaimsAt(int64_t first_page, int64_t seq_len_min,
                                       int64_t expected_tokens) const {
  const int64_t pages_expected = PagesOf(expected_tokens, shape_.page_tokens);
  if (shape_.window == 0) {
    const bool done = seq_len_min >= expected_tokens;
    return {.begin = done ? pages_expected : seq_len_min / shape_.page_tokens,
            .end = pages_expected};
  }
  const int64_t held_max = ClaimsOfEmpty(shape_, shape_.seq_len_max);
  return {.begin = std::min(first_page, pages_expected),
          .end = std::min(first_page + held_max, pages_expected)};
}

bool BlockTable::ClaimedAfterReclaim(int64_t page_no, int64_t first_page) const {
  if (shape_.window == 0) return Claimed(page_no);
  return ClaimsAt(first_page, 0, expected_tokens_).contains(page_no);
}

void BlockTable::AddClaims(int64_t begin, int64_t end) {
  int64_t open = std::max<int64_t>(0, end - begin);
  for (int64_t i = std::max(begin, first_page_); i < std::min(end, end_page()); ++i) {
    if (page(i) == kNoPage) continue;
    pool_->AddClaim(page(i));
    --open;
  }
  pool_->AddOpenClaims(open);
}

void BlockTable::DropClaims(int64_t begin, int64_t end) {
  int64_t open = std::max<int64_t>(0, end - begin);
  for (int64_t i = std::max(begin, first_page_); i < std::min(end, end_page()); ++i) {
    if (page(i) == kNoPage) continue;
    pool_->DropClaim(page(i));
    --open;
  }
  pool_->DropOpenClaims(open);
}

void BlockTable::MoveClaims(int64_t seq_len_min) {
  const Range to = ClaimsAt(first_page_, seq_len_min, expected_tokens_);
  // What leaves the range, then what enters it; the two ranges may be apart.
  DropClaims(claims_.begin, std::min(claims_.end, to.begin));
  DropClaims(std::max(claims_.begin, to.end), claims_.end);
  AddClaims(to.begin, std::min(to.end, claims_.begin));
  AddClaims(std::max(to.begin, claims_.end), to.end);
  claims_ = to;
}

void BlockTable::Start(int64_t expected_tokens) {
  FP8KVD_CHECK(table_.empty() && claims_.begin == claims_.end);
  expected_tokens_ = expected_tokens;
  MoveClaims(0);
}

void BlockTable::ShareFrom(const BlockTable& parent, int64_t expected_tokens, int64_t seq_len_min) {
  FP8KVD_CHECK(table_.empty() && claims_.begin == claims_.end);
  table_.assign(parent.table_.begin(), parent.table_.end());
  first_page_ = parent.first_page_;
  expected_tokens_ = expected_tokens;
  for (PageId page_id : pages()) pool_->AddOwner(page_id);
  MoveClaims(seq_len_min);
}

void BlockTable::Adopt(int64_t first_page, absl::Span<const PageId> page_ids,
                       int64_t expected_tokens, int64_t seq_len_min) {
  FP8KVD_CHECK(table_.empty() && claims_.begin == claims_.end);
  table_.assign(static_cast<size_t>(first_page), kNoPage);
  table_.insert(table_.end(), page_ids.begin(), page_ids.end());
  first_page_ = first_page;
  expected_tokens_ = expected_tokens;
  MoveClaims(seq_len_min);
}

int64_t BlockTable::ShareNeed(int64_t children, int64_t expected_tokens,
                              int64_t seq_len_min) const {
  const Range to = ClaimsAt(first_page_, seq_len_min, expected_tokens);
  int64_t need = 0;
  int64_t open = to.end - to.begin;
  for (int64_t i = first_page_; i < end_page(); ++i) {
    const int64_t owners = pool_->owners(page(i));
    const int64_t claims = pool_->claims(page(i));
    const int64_t claimed = to.contains(i) ? 1 : 0;
    open -= claimed;
    need += NeedOf(owners + children, claims + claimed * children) - NeedOf(owners, claims);
  }
  return need + open * children;
}

int64_t BlockTable::TruncateNeed(int64_t pos, int64_t seq_len_min) const {
  const int64_t kept_end = PagesOf(pos, shape_.page_tokens);
  const Range to = ClaimsAt(first_page_, seq_len_min, expected_tokens_);
  int64_t need = 0;
  for (int64_t i = std::max(first_page_, std::min(to.begin, kept_end)); i < end_page(); ++i) {
    const int64_t owners = pool_->owners(page(i));
    const int64_t claims = pool_->claims(page(i));
    const int64_t claimed = Claimed(i) ? 1 : 0;
    const int64_t claimed_after = to.contains(i) ? 1 : 0;
    need -= NeedOf(owners, claims);
    if (i < kept_end) {
      need += NeedOf(owners, claims - claimed + claimed_after);
    } else {
      need += NeedOf(owners - 1, claims - claimed) + claimed_after - (owners == 1 ? 1 : 0);
    }
  }
  return need;
}

void BlockTable::TakeOut(int64_t page_no) {
  PageId& entry = table_[static_cast<size_t>(page_no)];
  if (Claimed(page_no)) {
    pool_->DropClaim(entry);
    pool_->AddOpenClaims(1);
  }
  entry = kNoPage;
}

void BlockTable::Truncate(int64_t pos, int64_t seq_len_min) {
  const int64_t kept_end = std::max(first_page_, PagesOf(pos, shape_.page_tokens));
  while (end_page() > kept_end) {
    const PageId page_id = table_.back();
    TakeOut(end_page() - 1);
    table_.pop_back();
    pool_->DropOwner(page_id);
  }
  MoveClaims(seq_len_min);
}

void BlockTable::Clear() {
  DropClaims(claims_.begin, claims_.end);
  claims_ = {};
  for (PageId page_id : pages()) pool_->DropOwner(page_id);
  table_.clear();
  first_page_ = 0;
  expected_tokens_ = 0;
}

void BlockTable::Set(int64_t page_no, PageId page_id) {
  FP8KVD_CHECK(first_page_ <= page_no && page_no <= end_page());
  if (page_no == end_page()) {
    table_.push_back(kNoPage);
  } else {
    const PageId before = page(page_no);
    TakeOut(page_no);
    pool_->DropOwner(before);
  }
  table_[static_cast<size_t>(page_no)] = page_id;
  if (Claimed(page_no)) {
    pool_->DropOpenClaims(1);
    pool_->AddClaim(page_id);
  }
}

void BlockTable::Reclaim(int64_t page_no, int64_t kept) {
  for (int64_t i = first_page_; i < std::min(page_no, end_page()); ++i) {
    const PageId page_id = page(i);
    TakeOut(i);
    pool_->CountEviction();
    if (kept > 0 && pool_->owners(page_id) == 1) {
      --kept;
    } else {
      pool_->DropOwner(page_id);
    }
  }
  FP8KVD_CHECK(kept == 0);
  if (page_no > end_page()) table_.resize(static_cast<size_t>(page_no), kNoPage);
  first_page_ = std::max(first_page_, page_no);
}

}  // namespace fp8kvd::cache
