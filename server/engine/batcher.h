// server/engine/batcher.h: what waits, in arrival order, and which of it goes next.
//
// Look walks the list once, oldest first. It picks
//   - every control request that nothing older stands in the way of;
//   - one decode batch: the oldest eligible item gives the kernel shape, and every eligible item of
//     that shape joins, whatever its sequence, layer or model, until the launch is full: of rows,
//     or of KV bytes where those are bounded. Then an item joins if four of its size would still
//     fit. So the long ones cannot fill a launch, and a short item waits for older ones about as
//     short as itself, however many long ones are older. The oldest always goes: nobody starves.
//   - one bulk append, whose next slice follows the batch: of those eligible, one of the sequence
//     that had its turn longest ago.
// Order. Work on one (sequence, layer) is taken as it arrived: what is passed over marks its
//   (sequence, layer) in `blocked_`, and nothing younger with that mark is eligible. Several items
//   of one (sequence, layer) may share a batch: their appends are planned in order, all are
//   launched before the decode, and a query at position p sees keys up to p whatever else is
//   committed. A control request waits for all older work on its sequences, and all younger work
//   waits for it.
// Does not manage: planning, launching, answering (the steps, the engine).
// Threads: the engine's. Cost: Look is O(items that wait) when not all fit, else O(items picked).
//   No allocation once constructed.
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

  Batcher(const std::vector<ModelSetup>* models, Bounds bounds, int32_t places_max,
          int32_t seqs_max);

  void Add(Request* request);     // with waiting > 0 (control: any)
  void Remove(Request* request);  // nothing of it waits any more
  // The pick stays good until the next Look, Add or Remove of what is in it.
  const Pick& Look(TimeUs now);
  // The sequence of `append` had its turn.
  void EndTurn(const AppendRequest& append);
  Request* TakeAll();  // everything that waits, linked by book.next
  bool empty() const { return oldest_ == nullptr; }

 private:
  bool EndIfLate(Request* request, TimeUs now);
  void LookAtDecode(DecodeRequest* request);
  void LookAtAppend(AppendRequest* request);
  void LookAtControl(ControlRequest* request);
  bool HasRoom(const DecodeRequest& request, const DecodeItem& item);
  DecodeShape ShapeOf(const DecodeRequest& request) const;

  const std::vector<ModelSetup>* const models_;
  const size_t rows_max_;
  const int64_t kv_bytes_max_;
  Request* oldest_ = nullptr;
  Request* newest_ = nullptr;
  int64_t others_ = 0;  // appends and controls in the list
  KeySet blocked_;
  std::vector<uint64_t> last_turn_;  // [seqs_max] when the sequence's append had a slice
  uint64_t turns_ = 0;
  Pick pick_;
  int64_t kv_bytes_left_ = 0;  // of the pick
  Request** ended_tail_ = nullptr;
  Request** controls_tail_ = nullptr;
};

}  // namespace fp8kvd::engine
