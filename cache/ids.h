// cache/ids.h: the names that the cache gives to things, as distinct types: the compiler refuses a
// page id where a sequence is wanted, and there is no arithmetic between them.
#pragma once

#include <cstdint>

namespace fp8kvd::cache {

// A page of one pool, 0 .. pages_total - 1. Pools number their pages independently.
enum class PageId : uint32_t {};
inline constexpr PageId kNoPage{UINT32_MAX};

// What a client calls a sequence; reused after a free, hence the generation beside it.
enum class SeqId : uint64_t {};

// Where a sequence stands in the store, 0 .. seqs_max - 1: dense, so that the engine can keep one
// device block table per (SeqIndex, group). Never leaves the daemon.
enum class SeqIndex : uint32_t {};

// Whose a sequence is, 0 .. the number of tenants - 1. Opaque here: a call that names a sequence of
// another tenant is answered as if there were none.
enum class TenantId : uint32_t {};

// A client's name for a sequence. Any field that does not match is NOT_FOUND.
struct SeqHandle {
  SeqId seq_id{0};
  uint32_t generation = 0;   // never 0 for a sequence that exists
  uint32_t home = 0;         // of the stores of a daemon, the one that made it
  uint64_t incarnation = 0;  // of the daemon run that made it

  bool operator==(const SeqHandle&) const = default;
};

// The place of one token: a page and an offset in tokens within it.
struct Slot {
  PageId page_id = kNoPage;
  int32_t offset = 0;

  bool operator==(const Slot&) const = default;
};

}  // namespace fp8kvd::cache
