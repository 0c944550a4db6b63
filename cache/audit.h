// cache/audit.h: counts every page of every pool from the block tables, as if the pools kept no
// books, and compares.
//
// Promises: OK means that for each pool used + free == total, each page has exactly the owners and
//   claims that tables (and an open plan) give it, the reserved pages are what the claims come to,
//   and they fit into the free ones. Otherwise INTERNAL names the first page or sum that differs.
// Does not manage: what to do about it; a difference is a bug of ours.
// Threads: with the store's one caller. Cost: O(all pages + all table entries), allocates.
#pragma once

#include "absl/status/status.h"

#include "cache/seq_store.h"

namespace fp8kvd::cache {

absl::Status Audit(const SeqStore& store);

}  // namespace fp8kvd::cache
