// server/engine/messages.h: what a call hands to the engine and gets back. Plain data, no proto, no
// gRPC. A request object belongs to its call; the engine writes the reply into it.
//
// A call's life (the engine's side of style "one thread owns a call"):
//   1. Its poller fills the request, has its tensors in a staging slot, checked (range) and
//      digested.
//   2. Engine::Submit(request): a Status here means refused, nothing was kept. Ok: the engine has
//      it.
//   3. A turn of the engine runs it and calls request->done->Done() exactly once, after which it
//      never touches the request again. Done() must return at once (it posts an event to the call's
//      poller).
//   4. The poller copies out and lse from the slot, gives the slot back, finishes the call.
// The call may set `cancelled` at any time; the engine looks before it begins work, never after.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "cache/ids.h"
#include "kernels/params.h"

namespace fp8kvd::engine {

// Microseconds of a clock that only moves forward; the engine is handed one (clock.h).
using TimeUs = int64_t;
inline constexpr TimeUs kNoDeadline = std::numeric_limits<TimeUs>::max();

class Completion {
 public:
  // Within a turn of the engine: on its thread, or on that of any caller of Submit, which may be
  // this request's own, before Submit has returned. Must not block, allocate much or call the
  // engine.
  virtual void Done() = 0;

 protected:
  ~Completion() = default;
};

// What every request has.
struct Request {
  enum class Kind : uint8_t { kDecode, kAppend, kControl };
  explicit Request(Kind request_kind) : kind(request_kind) {}

  const Kind kind;
  Completion* done = nullptr;
  cache::TenantId tenant{0};  // who asks: sequences of others are unknown to the request
  TimeUs arrived = 0;
  TimeUs staged = 0;  // read, checked and copied: given to Submit
  TimeUs deadline = kNoDeadline;
  std::atomic<bool> cancelled{false};
  // Whoever sends it takes turns by Engine::LookOn until Done: no thread has to be woken for its
  // end alone.
  bool looks_on = false;
  absl::Status status;  // of the request as a whole
  // Advice that goes with RESOURCE_EXHAUSTED in status or in an item. Milliseconds; 0: none.
  int32_t retry_after_ms = 0;

  // The engine's own from Submit to Done; a call leaves it alone.
  struct Book {
    Request* next = nullptr;  // in admission's stack, in the batcher's list, among the answers
    Request* prev = nullptr;  // in the batcher's list
    int32_t places = 0;       // that it takes in the queue
    int32_t waiting = 0;      // decode: items not begun; append: pieces not begun
    // Decode: items in launches; append: launches that read its slot, and slices that are coming.
    int32_t running = 0;
  };
  Book book;
};

struct DecodeItem {
  cache::SeqHandle handle;
  int64_t pos = 0;  // of the first query token
  int32_t q_len = 1;
  int32_t row = 0;         // first row of the item in q, k, v, out, lse: sum of q_lens before it
  uint64_t kv_digest = 0;  // of its k and v rows; unused when attend-only
  absl::Status status;     // a poller may set it (range check); the engine skips such an item
  int32_t retry_after_ms = 0;

  // The engine's own.
  enum class Stage : uint8_t { kWaiting, kRunning, kAnswered };
  Stage stage = Stage::kAnswered;
  cache::SeqIndex seq{0};  // held unless kAnswered
};

// One layer of one step for a batch of sequences of one model. Tensors lie in one staging slot.
struct DecodeRequest : Request {
  DecodeRequest() : Request(Kind::kDecode) {}

  int32_t model = 0;  // index into the configured models
  int32_t layer = 0;
  absl::Span<DecodeItem> items;
  const uint16_t* q = nullptr;  // [n, q_heads, head_dim]
  const uint16_t* k = nullptr;  // [n, kv_heads, head_dim], null: attend only
  const uint16_t* v = nullptr;
  const float* sink_logits = nullptr;  // [q_heads], null: none or left out
  void* out = nullptr;   // [n, q_heads, head_dim]; rows of failed items are left alone
  float* lse = nullptr;  // [n, q_heads], null: not asked
  kernels::OutType out_type = kernels::OutType::kBf16;
  // Of a message that another request stands for in what is counted by message (spread.h).
  bool is_rest = false;
  // Filled by the engine.
  TimeUs launched = 0;
  TimeUs fenced = 0;
  int32_t batch_items = 0;
};

// The items of one message whose sequences are on one device, as a request of that device.
struct DecodePart {
  int32_t device = 0;
  int64_t slot_bytes = 0;  // of its tensors and its results
  DecodeRequest request;
};

// K and V of [pos, pos + n) in layers [layer, layer + layers_count) of one sequence.
struct AppendRequest : Request {
  AppendRequest() : Request(Kind::kAppend) {}

  int32_t model = 0;
  cache::SeqHandle handle;
  int32_t layer = 0;
  int32_t layers_count = 1;
  int64_t pos = 0;
  int32_t n = 0;
  int64_t skip_to = 0;          // 0: off
  const uint16_t* k = nullptr;  // [layers_count, n, kv_heads, head_dim]
  const uint16_t* v = nullptr;
  // A chunk commits in slices of slice_tokens (AppendSliceTokens in append_step.h gives the
  // number); slice_digests [layers_count, ceil(n / slice_tokens)] are of each slice's k and v rows.
  int32_t slice_tokens = 0;
  absl::Span<const uint64_t> slice_digests;
  // Filled by the engine: committed tokens of each layer [layers_count] when the last piece was
  // taken or the chunk failed; 0 if the sequence is gone.
  absl::Span<int64_t> seq_lens;
  // The engine's own.
  int32_t pieces_done = 0;    // of (slice, layer), the layer running fastest
  int32_t pieces_coming = 0;  // of those not begun, from the front: their rows are on their way
  bool is_held = false;
  cache::SeqIndex seq{0};
};

// What is known of one sequence.
struct SequenceInfo {
  cache::SeqHandle handle;
  int32_t model = 0;
  std::vector<int64_t> seq_lens;  // [layers]
  int64_t pages = 0;
  int64_t pages_shared = 0;
  int64_t bytes = 0;
  int64_t expected_tokens = 0;
  int64_t ttl_ms = 0;
  int64_t ttl_left_ms = 0;
};

// Everything that is not on the decode path. Runs between launches, and in arrival order with
// whatever else names the same sequences.
struct ControlRequest : Request {
  enum class Op : uint8_t { kCreate, kFork, kTruncate, kFree, kRenew, kStat, kList };
  explicit ControlRequest(Op control_op) : Request(Kind::kControl), op(control_op) {}

  const Op op;
  // kCreate: model, count, expected_tokens, ttl_ms -> handles. kFork: handles[0] is the parent.
  // kTruncate: handles, seq_lens. kFree, kRenew, kStat: handles. kList: model (-1: all), count,
  // list_after (0: from the start) -> infos, list_next (0: that was the last).
  int32_t model = -1;
  int32_t count = 1;
  int64_t expected_tokens = 0;
  int64_t ttl_ms = 0;                     // 0: the default
  std::vector<cache::SeqHandle> handles;  // in; of kCreate and kFork: out
  std::vector<int64_t> seq_lens;
  uint64_t list_after = 0;
  // Out.
  std::vector<absl::Status> item_status;  // [handles] of kTruncate, kFree, kRenew, kStat
  std::vector<SequenceInfo> infos;
  uint64_t list_next = 0;
  // The engine's own: sequences that the request names and holds.
  std::vector<cache::SeqIndex> held;
};

}  // namespace fp8kvd::engine
