// server/engine/batcher.h: what waits, in arrival order, and which of it goes next.
//
// Look walks the list once, oldest first. It picks
//   - every control request that nothing older stands in the way of;
//   - one decode batch: the oldest eligible item gives the kernel shape, and every eligible item of
//     that shape joins, whatever its sequence, layer or model, until the launch is full: of rows,
//     or of KV bytes where those are bounded. Then an item joins if four of its size would still
//     fit. So the long ones cannot fill a launch, and a short item waits for older ones about as
//     short as itself, however many long ones are older. The oldest always goes: nobody starves.
//   - one bulk append, whose next slice follows the batch: of those eligible that have a slice left
//     to set out, one of the sequence that had its turn longest ago.
// Tenants. Each has a line of its own, and the rule above is that of one line. Where several have
//   decodes waiting they share each launch: a line has room for its part of the launch's KV bytes,
//   kv_bytes_max / lines, less what it owes. What it takes beyond its part it owes, and a line that
//   finds no room for all it has is owed what it did not take, kv_bytes_max at most. The line that
//   owes least leads, in turn those that owe nothing: its oldest item gives the shape and always
//   goes. So in the long run lines that always wait get alike KV bytes, whatever the number and
//   length of their items, and one that seldom waits finds little before it. A line alone may take
//   all and owes nothing. Appends: one of the line that had its turn longest ago.
// Order. Work on one (sequence, layer) is taken as it arrived: what is passed over marks its
//   (sequence, layer) in `blocked_`, and nothing younger with that mark is eligible. Several items
//   of one (sequence, layer) may share a batch: their appends are planned in order, all are
//   launched before the decode, and a query at position p sees keys up to p whatever else is
//   committed. A control request waits for all older work on its sequences, and all younger work
//   waits for it. At most kControlsMax control requests of a line go between two launches.
// Does not manage: planning, launching, answering (the steps, the engine).
// Threads: the engine's. Cost: Look is O(items that wait) when not all fit, else O(items picked);
//   and O(lines that wait * log of that). No allocation once constructed.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

#include "server/engine/messages.h"
#include "server/engine/model_setup.h"

namespace fp8kvd::engine {

// What the rows of one decode launch have in common.
struct DecodeShape {
  int32_t head_dim = 0;
  int32_t group = 0;
  Precision precision = Precision::kBf16;
  kernels::OutType out_type = kernels::OutType::kBf16;

  bool operator==(const DecodeShape&) const = default;
};

struct BatchItem {
  DecodeRequest* request = nullptr;
  int32_t index = 0;  // into request->items

  DecodeItem& item() const { return request->items[index]; }
};

// A set of 64-bit keys of bounded size, emptied in O(1).
class KeySet {
 public:
  explicit KeySet(int64_t keys_max);  // keys ever in it at once
  void Clear() { ++round_; }
  void Insert(uint64_t key);
  bool Contains(uint64_t key) const;

 private:
  struct Entry {
    uint64_t key = 0;
    uint64_t round = 0;
  };
  size_t Find(uint64_t key) const;  // its entry, or the free one where it would stand

  std::vector<Entry> entries_;
  uint64_t round_ = 1;
};

class Batcher {
 public:
  struct Pick {
    DecodeShape shape;
    std::vector<BatchItem> items;
    AppendRequest* append = nullptr;
    Request* controls = nullptr;   // linked by book.next; taken out of the list
    Request* ended = nullptr;      // late or cancelled, linked and taken out likewise
    TimeUs oldest_arrived = 0;     // of items
    bool has_passed_over = false;  // eligible items of the shape that found no room
  };

  // A launch's rows, and the KV bytes that they read beside its oldest, each query token counted.
  struct Bounds {
    int32_t rows_max = 0;
    int64_t kv_bytes_max = 0;
  };

  static constexpr int32_t kControlsMax = 64;

  Batcher(const std::vector<ModelSetup>* models, Bounds bounds, int32_t places_max,
          int32_t seqs_max, int32_t tenants);

  void Add(Request* request);     // with waiting > 0 (control: any)
  void Remove(Request* request);  // nothing of it waits any more
  // The pick stays good until the next Look, Add or Remove of what is in it.
  const Pick& Look(TimeUs now);
  // The sequence of `append` had its turn.
  void EndTurn(const AppendRequest& append);
  // These items of the latest pick went into a launch.
  void EndRound(absl::Span<const BatchItem> launched);
  Request* TakeAll();  // everything that waits, linked by book.next
  bool empty() const { return waiting_ == 0; }
  bool has_only_decodes() const { return others_ == 0; }

 private:
  // What waits of one tenant, in arrival order.
  struct Line {
    Request* oldest = nullptr;
    Request* newest = nullptr;
    int64_t decodes = 0;        // in it
    int64_t others = 0;         // appends and controls in it
    int64_t kv_bytes_owed = 0;  // below 0: it is owed
    uint64_t led = 0;           // when it led a launch, in rounds
    uint64_t append_turn = 0;   // when an append of it had a slice, in turns
    // Of the pick.
    int64_t kv_bytes_left = 0;
    int32_t controls_left = 0;
    bool has_more = false;  // decodes of it were not picked
  };

  Line& LineOf(const Request& request) { return lines_[static_cast<uint32_t>(request.tenant)]; }
  void ShareRoom();
  void LookAlong(Line& line, TimeUs now);
  bool EndIfLate(Request* request, TimeUs now);
  void LookAtDecode(DecodeRequest* request);
  void LookAtAppend(AppendRequest* request);
  void LookAtControl(ControlRequest* request);
  bool HasRoom(const DecodeRequest& request, const DecodeItem& item);
  int64_t KvBytesOf(const DecodeRequest& request, const DecodeItem& item) const;
  DecodeShape ShapeOf(const DecodeRequest& request) const;

  const std::vector<ModelSetup>* const models_;
  const size_t rows_max_;
  const int64_t kv_bytes_max_;
  std::vector<Line> lines_;   // by tenant
  std::vector<Line*> order_;  // those that wait, as the pick looks at them
  int64_t waiting_ = 0;       // requests in all lines
  int64_t others_ = 0;        // appends and controls among them
  uint64_t rounds_ = 0;
  KeySet blocked_;
  std::vector<uint64_t> last_turn_;  // [seqs_max] when the sequence's append had a slice
  uint64_t turns_ = 0;
  Pick pick_;
  int64_t kv_bytes_part_ = 0;  // of a line in the pick; 0: one line has it all
  Request** ended_tail_ = nullptr;
  Request** controls_tail_ = nullptr;
};

}  // namespace fp8kvd::engine
