#include "server/shm/ring.h"

#include <atomic>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace fp8kvd::shm {
namespace {

using Ref = std::atomic_ref<uint32_t>;
static_assert(Ref::is_always_lock_free, "the other side is another process");

uint32_t Load(Line& line) { return Ref(line.value).load(std::memory_order_seq_cst); }
void Store(Line& line, uint32_t value) { Ref(line.value).store(value, std::memory_order_seq_cst); }

// Reads each word once: a plain copy might be read a second time where it is used.
void CopyOnce(Request* from, Request* to) {
  constexpr size_t kWords = sizeof(Request) / sizeof(uint64_t);
  uint64_t words[kWords];
  for (size_t i = 0; i < kWords; ++i) {
    uint64_t* const word = reinterpret_cast<uint64_t*>(from) + i;
    words[i] = std::atomic_ref<uint64_t>(*word).load(std::memory_order_relaxed);
  }
  std::memcpy(to, words, sizeof(words));
}

template <typename... Parts>
absl::Status Lie(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts..., "; the session ends, open another"));
}

}  // namespace

Ring::Ring(const Welcome& layout, uint8_t* memory)
    : head_(reinterpret_cast<Head*>(memory)),
      requests_(reinterpret_cast<Request*>(memory + layout.requests_at)),
      replies_(reinterpret_cast<Reply*>(memory + layout.replies_at)),
      data_(memory + layout.data_at),
      data_bytes_(layout.data_bytes),
      entries_(layout.entries) {}

absl::StatusOr<bool> Ring::Take(Request* request) {
  const uint32_t waiting = Load(head_->requests_tail) - requests_head_;
  if (waiting == 0) return false;
  const uint32_t unread = replies_tail_ - Load(head_->replies_head);
  if (waiting > entries_ || unread > entries_ || waiting + inflight() + unread > entries_) {
    return Lie("requests_tail stands ", waiting, " ahead of what was taken and replies_head ",
               unread, " behind what was answered with ", inflight(),
               " in between, the rings have ", entries_, " entries for all three");
  }
  CopyOnce(&requests_[requests_head_ % entries_], request);
  if (absl::Status status = Check(*request); !status.ok()) return status;
  ++requests_head_;
  return true;
}

void Ring::PublishTaken() { Store(head_->requests_head, requests_head_); }

absl::Status Ring::Check(const Request& request) const {
  if (request.kind != Kind::kDecode && request.kind != Kind::kAppend) {
    return Lie("kind is ", static_cast<uint32_t>(request.kind), ", a request is 1 (decode) or 2");
  }
  if (request.head_bytes > kHeadBytesMax) {
    return Lie("head_bytes is ", request.head_bytes, ", a message without tensors has at most ",
               kHeadBytesMax);
  }
  const struct {
    const char* name;
    uint64_t at;
    uint64_t bytes;
  } places[] = {{"head", request.head_at, request.head_bytes},
                {"q", request.q_at, request.q_bytes},
                {"k", request.k_at, request.k_bytes},
                {"v", request.v_at, request.v_bytes},
                {"reply", request.reply_at, request.reply_bytes}};
  for (const auto& [name, at, bytes] : places) {
    if (bytes > data_bytes_ || at > data_bytes_ - bytes) {
      return Lie(name, " lies at ", at, " with ", bytes, " bytes, the data area has ", data_bytes_);
    }
  }
  return absl::OkStatus();
}

bool Ring::HasWork() const { return Load(head_->requests_tail) != requests_head_; }

void Ring::Put(const Reply& reply) { replies_[replies_tail_++ % entries_] = reply; }

void Ring::Publish() { Store(head_->replies_tail, replies_tail_); }

void Ring::Sleep() { Store(head_->server_sleeps, 1); }
void Ring::Wake() { Store(head_->server_sleeps, 0); }

bool Ring::TakeClientSleeps() {
  if (Load(head_->client_sleeps) == 0) return false;
  return Ref(head_->client_sleeps.value).exchange(0) != 0;
}

}  // namespace fp8kvd::shm
