// proto/fp8kvd/v1/shared_memory.h: the same-host transport in bytes: what a client and the daemon
// say on the unix socket, and what lies in the memory that they share. As binding as kv.proto;
// client/python/fp8kvd/_shm.py has the same numbers.
//
// The socket (SOCK_SEQPACKET) carries whole packets:
//   client  Hello, once; then one byte, a bell: "look at the requests"
//   server  Welcome with the memory's file descriptor (SCM_RIGHTS), or Farewell; then one byte, a
//           bell: "look at the replies", and at the end Farewell, which says why
// The memory: Head, then a ring of `entries` Requests, a ring of as many Replies, and the data area
// that the client alone divides up: heads of messages, tensors, room for replies. Places (`_at`)
// are bytes from the beginning of the data area.
//
// A message is what gRPC would carry: DecodeRequest or AppendRequest without q, k and v as protobuf
// bytes (its head), the three tensors beside it. The reply goes to the room that the request names.
// Indices count up for ever, modulo 2^32; the entry of index i is i % entries. Each index has one
// writer and is a sequentially consistent atomic; what lies behind it was written before it. A
// client has at most `entries` requests whose replies it has not taken.
// docs/decisions/0011 says why this is enough.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace fp8kvd::shm {

static_assert(std::endian::native == std::endian::little);

inline constexpr uint32_t kMagic = 0x4D48'5346;  // "FSHM"
inline constexpr uint32_t kVersion = 1;

inline constexpr size_t kTicketBytes = 64;  // characters, without a zero
inline constexpr size_t kReasonBytes = 496;

inline constexpr uint32_t kEntriesMin = 8;
inline constexpr uint32_t kEntriesMax = 1024;  // a power of two
// Of a message without its tensors.
inline constexpr uint64_t kHeadBytesMax = uint64_t{128} << 10;
// The room for a reply: the tensors, each rounded up to kAlign, and for the rest so much.
inline constexpr uint64_t kAlign = 64;
inline constexpr uint64_t kReplyBytes = 1024;
inline constexpr uint64_t kReplyBytesPerItem = 192;

struct Hello {
  uint32_t magic = kMagic;
  uint32_t version = kVersion;
  char ticket[kTicketBytes] = {};
  uint64_t memory_bytes = 0;  // wanted of data; 0: as much as the server gives
};

struct Welcome {
  uint32_t magic = kMagic;
  uint32_t entries = 0;
  uint64_t memory_bytes = 0;  // all of it
  uint64_t requests_at = 0;   // these three from the beginning of the memory
  uint64_t replies_at = 0;
  uint64_t data_at = 0;
  uint64_t data_bytes = 0;
};

struct Farewell {
  uint32_t magic = kMagic;
  uint32_t code = 0;  // google.rpc.Code
  char reason[kReasonBytes] = {};
};

// A line of the cache each, so that the two sides do not disturb each other.
struct alignas(128) Line {
  uint32_t value = 0;
};

struct Head {
  Line requests_tail;  // client's: written so far
  Line requests_head;  // server's: taken so far; of a decode the rows are read by then, too
  Line replies_tail;   // server's
  Line replies_head;   // client's
  Line server_sleeps;  // 1: ring the server's bell; who rings it puts 0
  Line client_sleeps;  // 1: ring the client's
};

enum class Kind : uint32_t { kDecode = 1, kAppend = 2 };

struct Request {
  Kind kind = Kind::kDecode;
  uint32_t timeout_ms = 0;  // from now on; 0: none
  uint64_t tag = 0;         // comes back in the reply
  uint64_t head_at = 0;
  uint64_t head_bytes = 0;
  uint64_t q_at = 0;
  uint64_t q_bytes = 0;
  uint64_t k_at = 0;
  uint64_t k_bytes = 0;
  uint64_t v_at = 0;
  uint64_t v_bytes = 0;
  uint64_t reply_at = 0;
  uint64_t reply_bytes = 0;
  uint64_t reserved[4] = {};
};

struct Reply {
  uint64_t tag = 0;
  uint32_t code = 0;  // 0: head is DecodeResponse or AppendResponse; else it is Error
  uint32_t reserved = 0;
  uint64_t head_at = 0;
  uint64_t head_bytes = 0;
  uint64_t out_at = 0;  // of a decode: DecodeResponse.out and lse, which its head leaves out
  uint64_t out_bytes = 0;
  uint64_t lse_at = 0;
  uint64_t lse_bytes = 0;
};

static_assert(sizeof(Hello) == 80 && sizeof(Welcome) == 48 && sizeof(Farewell) == 504);
static_assert(sizeof(Head) == 768 && sizeof(Request) == 128 && sizeof(Reply) == 64);

inline constexpr uint64_t kRequestsAt = 4096;  // Head has the first page for itself

inline constexpr uint64_t AlignUp(uint64_t bytes, uint64_t align = kAlign) {
  return (bytes + align - 1) / align * align;
}

}  // namespace fp8kvd::shm
