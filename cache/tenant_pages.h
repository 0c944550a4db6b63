// cache/tenant_pages.h: what one tenant holds and has reserved of one page pool, and may. Pages and
// claims are never shared between tenants, so all that a call changes in a pool is its tenant's:
// the store measures the pool before and after.
//
// Threads: one caller at a time. Cost: O(1).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cache/page_pool.h"

namespace fp8kvd::cache {

struct TenantPages {
  int64_t max = 0;
  int64_t used = 0;
  int64_t reserved = 0;

  // Pages that it may still take or reserve. It may have more than max, if that has shrunk.
  int64_t Left(const PagePool& pool) const {
    return std::max<int64_t>(0, std::min(pool.pages_unreserved(), max - used - reserved));
  }
};

// While it lives, what happens to the pool is put down to the tenant. Between two of its ends
// TenantPages says nothing: check for room before.
class Charge {
 public:
  Charge(const PagePool* pool, TenantPages* tenant) : pool_(pool), tenant_(tenant) { Add(-1); }
  ~Charge() { Add(1); }
  Charge(const Charge&) = delete;
  Charge& operator=(const Charge&) = delete;

 private:
  void Add(int64_t sign) {
    tenant_->used += sign * pool_->pages_used();
    tenant_->reserved += sign * pool_->pages_reserved();
  }

  const PagePool* const pool_;
  TenantPages* const tenant_;
};

}  // namespace fp8kvd::cache
