// server/translate/wire.h: reads a DecodeRequest or an AppendRequest where it lies, in the slices
// that gRPC received. A tensor comes out as the pieces of those slices, so that the only copy of
// its bytes is the one into a staging slot. Every other message goes through protobuf's own
// classes.
//
// Promises: accepts exactly the bytes that protobuf accepts, with the same values: the last of a
//   singular field wins, a singular message merges, a repeated number comes packed or not, unknown
//   fields and groups are skipped, strings are UTF-8 (tests/fuzz/wire_fuzz.cc holds the two against
//   each other). A stranger's count never becomes memory: arrays keep their first kItemsMax (sinks:
//   kQHeadsMax) entries and count the rest, a model's name keeps kNameBytesMax.
// Does not manage: whether the values make sense (requests.h).
// Threads: none of its own; an object serves one message at a time. Cost: one pass over the fields
//   that are not tensors; memory is kept from message to message.
// Errors: INVALID_ARGUMENT with the byte at which the message stops being one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "config/base/limits.h"

namespace fp8kvd::translate {

// Bytes that lie together in one slice of a message.
using Piece = absl::Span<const uint8_t>;

// Bytes of a model's name that are kept. Longer ones are no name that config accepts.
inline constexpr size_t kNameBytesMax = 256;

// A bytes field as the pieces it lies in. Valid while the message's slices are.
struct Pieces {
  std::vector<Piece> pieces;
  int64_t size = 0;

  void Clear();
  void Set(Piece piece);  // that alone
  // Copies all of it; `to` has room for size bytes.
  void CopyTo(uint8_t* to) const;
};

// Reads ranges of a field that come in ascending order, in one walk over its pieces. A range
// [at, at + bytes) is inside, and not before the range before.
class RangeReader {
 public:
  explicit RangeReader(const Pieces* from) : from_(from) {}
  void Copy(int64_t at, int64_t bytes, uint8_t* to);
  // Where the range lies, if in one piece; else it is copied to `room`, and that.
  const uint8_t* Get(int64_t at, int64_t bytes, uint8_t* room);

 private:
  void GoTo(int64_t at);  // the piece that has it

  const Pieces* const from_;
  size_t piece_ = 0;
  int64_t piece_at_ = 0;  // where it begins in the field
};

// The first `Max` entries of a repeated field, and how many there were.
template <typename T, int64_t Max>
struct Bounded {
  std::vector<T> kept;
  int64_t count = 0;

  void Clear() {
    kept.clear();
    count = 0;
  }
  void Add(T value) {
    if (count < Max) kept.push_back(value);
    ++count;
  }
};

struct WireHandle {
  uint64_t seq_id = 0;
  uint32_t generation = 0;
  uint64_t incarnation = 0;
  uint32_t home = 0;
};

struct WireName {
  std::string kept;  // the first kNameBytesMax bytes
  int64_t size = 0;
};

// Fields as in proto/fp8kvd/v1/kv.proto.
struct WireDecode {
  uint64_t request_id = 0;
  WireName model;
  uint32_t layer = 0;
  Bounded<WireHandle, kItemsMax> handles;
  Bounded<uint64_t, kItemsMax> positions;
  Bounded<uint32_t, kItemsMax> q_lens;
  Pieces q;
  Pieces k;
  Pieces v;
  Bounded<float, kQHeadsMax> sink_logits;
  bool omit_sinks = false;
  bool want_lse = false;
  int32_t out_type = 0;
  uint32_t timeout_ms = 0;

  // Reads a whole message into *this, whatever it held before.
  absl::Status Read(absl::Span<const Piece> message);
};

struct WireAppend {
  WireName model;
  bool has_handle = false;
  WireHandle handle;
  uint32_t layer = 0;
  uint32_t layers_count = 0;
  uint64_t pos = 0;
  uint32_t n = 0;
  Pieces k;
  Pieces v;
  uint64_t skip_to = 0;

  absl::Status Read(absl::Span<const Piece> message);
};

}  // namespace fp8kvd::translate
