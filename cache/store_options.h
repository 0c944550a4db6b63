// cache/store_options.h: what a SeqStore is built from. Plain data; CheckOptions says what is
// wrong.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"

#include "cache/ids.h"
#include "config/base/limits.h"

namespace fp8kvd::cache {

// A layer group: layers that share a pool and, per sequence, a block table.
struct GroupOptions {
  std::vector<int32_t> layers;  // model layers, ascending; the position in it is group_layer
  int32_t window = 0;           // latest tokens seen; 0: all, and nothing is ever reclaimed
  int64_t pages_total = 0;      // 1 .. kPagesMax; SeqPagesMax (config/base/geometry.h) sizes it
};

struct ModelOptions {
  std::vector<GroupOptions> groups;  // every layer of the model is in exactly one
};

// What a tenant may have.
struct TenantLimits {
  int32_t seqs_max = INT32_MAX;
  // Part of each pool that its sequences hold or have reserved, 0 .. 1.
  double pages_share_max = 1.0;
};

struct StoreOptions {
  std::vector<ModelOptions> models;
  std::vector<TenantLimits> tenants = {{}};  // by TenantId, 1 .. kTenantsMax
  // In every handle. New at every start, except that a restored snapshot brings its own.
  uint64_t incarnation = 0;
  // In every handle too: which of the daemon's stores this is.
  uint32_t home = 0;

  // Sequences that exist at once. More cost a few hundred bytes each before they are first used.
  int32_t seqs_max = 1024;
  // Tokens of one sequence. A block table takes 4 bytes for every page_tokens of it.
  int64_t seq_len_max = 131072;
  // A windowed group keeps this many tokens more than its window, so that a client may step back
  // (truncate, or attend again) by as many.
  int32_t reclaim_slack_tokens = 128;
  // Appends per (sequence, layer) that a retry can still be recognised for. 16 bytes each.
  int32_t replay_digests_max = 8;
  // Tokens of a page. Only tests change it: kernels are built for kPageTokens.
  int32_t page_tokens = kPageTokens;
  // Called for every page that becomes free, from within the call that frees it; may be empty. The
  // engine poisons pages here in debug builds. It must not call the store.
  std::function<void(int32_t model, int32_t group, PageId page_id)> on_page_freed;
};

// INVALID_ARGUMENT says which field is out of its range and what the range is.
absl::Status CheckOptions(const StoreOptions& options);

}  // namespace fp8kvd::cache
