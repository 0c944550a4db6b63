// cache/append_plan.h: what an append asks, what it is answered, and the exactly-once verdict that
// lets a client retry anything. SeqStore::PlanAppend makes plans; the engine turns page ids into
// addresses, queues the byte work and commits.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "cache/ids.h"
#include "cache/replay_window.h"

namespace fp8kvd::cache {

// Tokens [pos, pos + n) of one layer of one sequence.
struct AppendArgs {
  int32_t layer = 0;    // model layer
  int64_t pos = 0;      // position of the first token
  int32_t n = 0;        // tokens, >= 1
  uint64_t digest = 0;  // of the tokens' bytes; opaque here, equal bytes have equal digests
  // Positions before it count as committed and reclaimed, in every layer of the group that stands
  // below it, because a page belongs to all layers of its group. 0: none. Windowed layers only;
  // 0 <= skip_to <= pos.
  int64_t skip_to = 0;
};

enum class AppendVerdict : uint8_t {
  kCommit,  // new tokens: do the work, then Commit
  kReplay,  // these very tokens are committed already: answer success, do nothing
};

// The rule of tests/data/append_verdicts.txt, for a layer of seq_len committed tokens:
//   kCommit              pos == seq_len (or == skip_to > seq_len)
//   kReplay              [pos, pos + n) is one of the latest appends, same digest
//   ALREADY_EXISTS       [pos, pos + n) is one of the latest appends, other digest
//   OUT_OF_RANGE         beyond seq_len or straddling it; the message names seq_len
//   FAILED_PRECONDITION  any other range below seq_len
//   INVALID_ARGUMENT     n < 1, pos < 0, skip_to outside 0 .. pos
absl::StatusOr<AppendVerdict> JudgeAppend(const AppendArgs& args, int64_t seq_len,
                                          const ReplayWindow& replay);

// A page to be copied whole, before the append writes: `from` has other owners who keep it.
struct PlannedCopy {
  PageId from;
  PageId to;
};

// A block table entry to be set before the append is launched.
struct PlannedEdit {
  int64_t page_no;  // tokens [page_no * page_tokens, + page_tokens)
  PageId page_id;
};

// The spans point into the store and end with Commit, Abandon, or (kReplay) the next PlanAppend.
struct AppendPlan {
  AppendVerdict verdict = AppendVerdict::kReplay;
  SeqIndex seq{0};
  int32_t model = 0;
  int32_t group = 0;        // layer group of the layer: all ids below are of its pool
  int32_t group_layer = 0;  // the layer's index within the group
  int64_t pos = 0;
  int32_t n = 0;
  int64_t seq_len_after = 0;             // committed tokens of the layer once all is done
  absl::Span<const PlannedCopy> copies;  // do these first,
  absl::Span<const PlannedEdit> edits;   // then these; every `to` of a copy is in here too
};

}  // namespace fp8kvd::cache
