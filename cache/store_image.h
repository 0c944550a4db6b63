// cache/store_image.h: all that a store knows of its sequences, as plain numbers: what a snapshot
// keeps of one run's store, and what a later run's store is made of (SeqStore::Image, Restore).
//
// Pages are numbered anew, by pool, from 0 on in the order of their ids; a restored store holds
// page n under the id n. Leases are not in it: they start when it is restored. Freed sequences are
// in it by their generations alone, so that their handles stay NOT_FOUND.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/ids.h"
#include "cache/replay_window.h"

namespace fp8kvd::cache {

struct StoreImage {
  // A sequence in one layer group.
  struct Group {
    int64_t first_pos = 0;                          // positions before it are reclaimed
    std::vector<int64_t> seq_lens;                  // by group_layer
    std::vector<std::vector<ReplayEntry>> replays;  // by group_layer, the oldest first
    std::vector<uint32_t> pages;                    // page numbers, in token order
  };
  struct Seq {
    uint32_t index = 0;  // its SeqIndex
    int32_t model = 0;
    TenantId tenant{0};
    int64_t expected_tokens = 0;
    int64_t ttl_ms = 0;
    SeqHandle parent;
    std::vector<Group> groups;
  };

  uint64_t incarnation = 0;
  std::vector<uint32_t> generations;                    // by SeqIndex, of the latest sequence there
  std::vector<std::vector<std::vector<PageId>>> pages;  // [models][groups]: the ids of page numbers
  std::vector<Seq> seqs;                                // by index, ascending
};

}  // namespace fp8kvd::cache
