#include "server/translate/wire.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace fp8kvd::translate {
namespace {

// protobuf's limits, which decide what it refuses.
constexpr int kTagBytesMax = 5;
constexpr int kVarintBytesMax = 10;
constexpr int kSizeBytesMax = 5;
constexpr int kDepthMax = 100;  // of messages and groups within each other

enum WireType : uint32_t {
  kVarint = 0,
  kFixed64 = 1,
  kBytes = 2,
  kGroup = 3,
  kEndGroup = 4,
  kFixed32 = 5,
};

constexpr uint32_t Tag(uint32_t field, WireType type) { return field << 3 | type; }

// Walks the bytes of a message across its pieces. After a false nothing else may be called.
class Cursor {
 public:
  explicit Cursor(absl::Span<const Piece> message) : message_(message) {
    for (const Piece& piece : message) left_ += piece.size();
    SkipEmpty();
  }

  bool AtEnd() const { return left_ == 0; }
  size_t offset() const { return offset_; }

  // Narrows the cursor to the next `size` bytes, which Inside found to be there; Leave widens it
  // again and is false when not all of them were used.
  bool Inside(uint64_t size) const { return size <= left_; }
  size_t Enter(size_t size) {
    const size_t outside = left_ - size;
    left_ = size;
    return outside;
  }
  bool Leave(size_t outside) {
    if (left_ != 0) return false;
    left_ = outside;
    return true;
  }

  // A varint of at most bytes_max bytes; bits past the 64th are dropped, as protobuf does.
  bool Varint(int bytes_max, uint64_t* value) {
    uint64_t result = 0;
    for (int i = 0; i < bytes_max; ++i) {
      if (left_ == 0) return false;
      const uint8_t byte = message_[piece_][at_];
      Advance(1);
      result |= i < kVarintBytesMax - 1 ? uint64_t{byte & 0x7FU} << (7 * i) : uint64_t{byte} << 63;
      if (byte < 0x80) {
        *value = result;
        return true;
      }
    }
    return false;
  }

  // The length of what follows, which must be inside.
  bool Size(size_t* size) {
    uint64_t value = 0;
    if (!Varint(kSizeBytesMax, &value) || !Inside(value)) return false;
    *size = static_cast<size_t>(value);
    return true;
  }

  template <typename T>
  bool Fixed(T* value) {
    if (!Inside(sizeof(T))) return false;
    uint8_t bytes[sizeof(T)];
    size_t done = 0;
    Take(sizeof(T), [&](Piece piece) {
      std::memcpy(bytes + done, piece.data(), piece.size());
      done += piece.size();
    });
    std::memcpy(value, bytes, sizeof(T));  // little-endian, as this machine
    return true;
  }

  // Hands the next `size` bytes, which are inside, to take(Piece), piece by piece.
  template <typename F>
  void Take(size_t size, F take) {
    while (size > 0) {
      const Piece& piece = message_[piece_];
      const size_t part = std::min(size, piece.size() - at_);
      take(piece.subspan(at_, part));
      Advance(part);
      size -= part;
    }
  }

  void Skip(size_t size) {
    Take(size, [](Piece) {});
  }

 private:
  void Advance(size_t bytes) {  // at most what the piece has
    at_ += bytes;
    offset_ += bytes;
    left_ -= bytes;
    SkipEmpty();
  }
  void SkipEmpty() {
    while (piece_ < message_.size() && at_ == message_[piece_].size()) {
      ++piece_;
      at_ = 0;
    }
  }

  absl::Span<const Piece> message_;
  size_t piece_ = 0;  // message_[piece_] has bytes from at_ on, unless the message is at its end
  size_t at_ = 0;
  size_t left_ = 0;    // bytes until the end of the innermost Enter
  size_t offset_ = 0;  // in the whole message
};

bool ReadTag(Cursor& in, uint32_t* tag) {
  uint64_t value = 0;
  if (!in.Varint(kTagBytesMax, &value)) return false;
  *tag = static_cast<uint32_t>(value);
  return true;
}

// Steps over one field that nobody knows, groups with all that is in them. `depth` is that of the
// message it stands in.
bool SkipField(Cursor& in, uint32_t tag, int depth) {
  std::array<uint32_t, kDepthMax> open;  // field numbers of the groups we are in
  int groups = 0;
  for (;;) {
    const uint32_t field = tag >> 3;
    uint64_t value = 0;
    size_t size = 0;
    if (field == 0) return false;
    switch (tag & 7) {
      case kVarint:
        if (!in.Varint(kVarintBytesMax, &value)) return false;
        break;
      case kFixed64:
      case kFixed32:
        size = (tag & 7) == kFixed64 ? 8 : 4;
        if (!in.Inside(size)) return false;
        in.Skip(size);
        break;
      case kBytes:
        if (!in.Size(&size)) return false;
        in.Skip(size);
        break;
      case kGroup:
        if (depth + groups >= kDepthMax) return false;
        open[groups++] = field;
        break;
      case kEndGroup:
        if (groups == 0 || open[--groups] != field) return false;
        break;
      default:
        return false;
    }
    if (groups == 0) return true;
    if (!ReadTag(in, &tag)) return false;
  }
}

// Feeds bytes, in parts, to a check that they are UTF-8 as protobuf wants it: shortest form, no
// surrogates, nothing past U+10FFFF.
class Utf8 {
 public:
  bool Take(Piece bytes) {
    for (const uint8_t byte : bytes) {
      if (!Take(byte)) return false;
    }
    return true;
  }
  bool Complete() const { return more_ == 0; }

 private:
  bool Take(uint8_t byte) {
    if (more_ > 0) {
      if (byte < low_ || byte > high_) return false;
      --more_;
      low_ = 0x80;
      high_ = 0xBF;
      return true;
    }
    if (byte < 0x80) return true;
    if (byte < 0xC2 || byte > 0xF4) return false;
    more_ = byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : 3;
    if (byte == 0xE0) low_ = 0xA0;   // shorter forms exist
    if (byte == 0xED) high_ = 0x9F;  // surrogates
    if (byte == 0xF0) low_ = 0x90;
    if (byte == 0xF4) high_ = 0x8F;  // past U+10FFFF
    return true;
  }

  int more_ = 0;  // continuation bytes to come, the next within [low_, high_]
  uint8_t low_ = 0x80;
  uint8_t high_ = 0xBF;
};

bool ReadName(Cursor& in, WireName* name) {
  size_t size = 0;
  if (!in.Size(&size)) return false;
  name->kept.clear();
  name->size = static_cast<int64_t>(size);
  Utf8 utf8;
  bool valid = true;
  in.Take(size, [&](Piece piece) {
    valid = valid && utf8.Take(piece);
    const size_t keep = std::min(piece.size(), kNameBytesMax - name->kept.size());
    name->kept.append(reinterpret_cast<const char*>(piece.data()), keep);
  });
  return valid && utf8.Complete();
}

bool ReadPieces(Cursor& in, Pieces* field) {
  size_t size = 0;
  if (!in.Size(&size)) return false;
  field->Clear();
  field->size = static_cast<int64_t>(size);
  in.Take(size, [field](Piece piece) { field->pieces.push_back(piece); });
  return true;
}

template <typename T>
bool ReadNumber(Cursor& in, T* value) {
  uint64_t varint = 0;
  if (!in.Varint(kVarintBytesMax, &varint)) return false;
  *value = static_cast<T>(varint);
  return true;
}

template <typename T>
bool ReadElement(Cursor& in, T* value) {
  return ReadNumber(in, value);
}
bool ReadElement(Cursor& in, float* value) { return in.Fixed(value); }

template <typename T, int64_t Max>
bool ReadOne(Cursor& in, Bounded<T, Max>* array) {
  T value{};
  if (!ReadElement(in, &value)) return false;
  array->Add(value);
  return true;
}

template <typename T, int64_t Max>
bool ReadPacked(Cursor& in, Bounded<T, Max>* array) {
  size_t size = 0;
  if (!in.Size(&size)) return false;
  const size_t outside = in.Enter(size);
  while (!in.AtEnd()) {
    if (!ReadOne(in, array)) return false;
  }
  return in.Leave(outside);
}

bool ReadHandle(Cursor& in, WireHandle* handle) {
  size_t size = 0;
  if (!in.Size(&size)) return false;
  const size_t outside = in.Enter(size);
  while (!in.AtEnd()) {
    uint32_t tag = 0;
    if (!ReadTag(in, &tag)) return false;
    bool read = false;
    switch (tag) {
      case Tag(1, kFixed64):
        read = in.Fixed(&handle->seq_id);
        break;
      case Tag(2, kVarint):
        read = ReadNumber(in, &handle->generation);
        break;
      case Tag(3, kFixed64):
        read = in.Fixed(&handle->incarnation);
        break;
      case Tag(4, kVarint):
        read = ReadNumber(in, &handle->home);
        break;
      default:
        read = SkipField(in, tag, /*depth=*/1);
    }
    if (!read) return false;
  }
  return in.Leave(outside);
}

bool ReadField(Cursor& in, uint32_t tag, WireDecode* out) {
  switch (tag) {
    case Tag(1, kVarint):
      return ReadNumber(in, &out->request_id);
    case Tag(2, kBytes):
      return ReadName(in, &out->model);
    case Tag(3, kVarint):
      return ReadNumber(in, &out->layer);
    case Tag(4, kBytes): {
      WireHandle handle;
      if (!ReadHandle(in, &handle)) return false;
      out->handles.Add(handle);
      return true;
    }
    case Tag(5, kBytes):
      return ReadPacked(in, &out->positions);
    case Tag(5, kVarint):
      return ReadOne(in, &out->positions);
    case Tag(6, kBytes):
      return ReadPacked(in, &out->q_lens);
    case Tag(6, kVarint):
      return ReadOne(in, &out->q_lens);
    case Tag(7, kBytes):
      return ReadPieces(in, &out->q);
    case Tag(8, kBytes):
      return ReadPieces(in, &out->k);
    case Tag(9, kBytes):
      return ReadPieces(in, &out->v);
    case Tag(10, kBytes):
      return ReadPacked(in, &out->sink_logits);
    case Tag(10, kFixed32):
      return ReadOne(in, &out->sink_logits);
    case Tag(11, kVarint):
      return ReadNumber(in, &out->omit_sinks);
    case Tag(12, kVarint):
      return ReadNumber(in, &out->want_lse);
    case Tag(13, kVarint):
      return ReadNumber(in, &out->out_type);
    case Tag(14, kVarint):
      return ReadNumber(in, &out->timeout_ms);
    default:
      return SkipField(in, tag, /*depth=*/0);
  }
}

bool ReadField(Cursor& in, uint32_t tag, WireAppend* out) {
  switch (tag) {
    case Tag(1, kBytes):
      return ReadName(in, &out->model);
    case Tag(2, kBytes):
      out->has_handle = true;
      return ReadHandle(in, &out->handle);
    case Tag(3, kVarint):
      return ReadNumber(in, &out->layer);
    case Tag(4, kVarint):
      return ReadNumber(in, &out->layers_count);
    case Tag(5, kVarint):
      return ReadNumber(in, &out->pos);
    case Tag(6, kVarint):
      return ReadNumber(in, &out->n);
    case Tag(7, kBytes):
      return ReadPieces(in, &out->k);
    case Tag(8, kBytes):
      return ReadPieces(in, &out->v);
    case Tag(9, kVarint):
      return ReadNumber(in, &out->skip_to);
    default:
      return SkipField(in, tag, /*depth=*/0);
  }
}

template <typename Message>
absl::Status ReadMessage(absl::Span<const Piece> message, Message* out) {
  Cursor in(message);
  while (!in.AtEnd()) {
    uint32_t tag = 0;
    if (!ReadTag(in, &tag) || !ReadField(in, tag, out)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the bytes up to ", in.offset(),
          " are no message of this rpc; send fp8kvd.v1 messages as protobuf encodes them"));
    }
  }
  return absl::OkStatus();
}

void Clear(WireName* name) {
  name->kept.clear();
  name->size = 0;
}

}  // namespace

void Pieces::Clear() {
  pieces.clear();
  size = 0;
}

void Pieces::Set(Piece piece) {
  pieces.assign(1, piece);
  size = static_cast<int64_t>(piece.size());
}

void Pieces::CopyTo(uint8_t* to) const {
  for (const Piece& piece : pieces) {
    std::memcpy(to, piece.data(), piece.size());
    to += piece.size();
  }
}

void RangeReader::GoTo(int64_t at) {
  for (;;) {
    const auto size = static_cast<int64_t>(from_->pieces[piece_].size());
    if (at - piece_at_ < size) return;
    piece_at_ += size;
    ++piece_;
  }
}

void RangeReader::Copy(int64_t at, int64_t bytes, uint8_t* to) {
  while (bytes > 0) {
    GoTo(at);
    const Piece& piece = from_->pieces[piece_];
    const int64_t begin = at - piece_at_;
    const int64_t part = std::min(bytes, static_cast<int64_t>(piece.size()) - begin);
    std::memcpy(to, piece.data() + begin, static_cast<size_t>(part));
    at += part;
    to += part;
    bytes -= part;
  }
}

const uint8_t* RangeReader::Get(int64_t at, int64_t bytes, uint8_t* room) {
  GoTo(at);
  const Piece& piece = from_->pieces[piece_];
  const int64_t begin = at - piece_at_;
  if (begin + bytes <= static_cast<int64_t>(piece.size())) return piece.data() + begin;
  Copy(at, bytes, room);
  return room;
}

absl::Status WireDecode::Read(absl::Span<const Piece> message) {
  request_id = 0;
  Clear(&model);
  layer = 0;
  handles.Clear();
  positions.Clear();
  q_lens.Clear();
  q.Clear();
  k.Clear();
  v.Clear();
  sink_logits.Clear();
  omit_sinks = false;
  want_lse = false;
  out_type = 0;
  timeout_ms = 0;
  return ReadMessage(message, this);
}

absl::Status WireAppend::Read(absl::Span<const Piece> message) {
  Clear(&model);
  has_handle = false;
  handle = {};
  layer = 0;
  layers_count = 0;
  pos = 0;
  n = 0;
  k.Clear();
  v.Clear();
  skip_to = 0;
  return ReadMessage(message, this);
}

}  // namespace fp8kvd::translate
