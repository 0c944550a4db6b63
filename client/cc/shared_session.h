// client/cc/shared_session.h: one session of the same-host transport: requests into the daemon's
// shared memory, replies out of it (proto/fp8kvd/v1/shared_memory.h). Private to client/cc.
//
// Promises: a call that Send took ends: with its reply, or with UNAVAILABLE when the session
//   breaks; its memory is free again then, also if nobody waits for it any more. No background
//   thread: whoever waits takes all replies in, looking at the ring for spin_us, then sleeping.
// Does not manage: retries and new sessions (core.h).
// Threads: any. mutex_ is not held over a copy of tensors or a wait.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "client/cc/arena.h"
#include "client/cc/types.h"
#include "proto/fp8kvd/v1/shared_memory.h"

namespace fp8kvd::client {

// What a request consists of; read during Send only.
struct SharedMessage {
  shm::Kind kind = shm::Kind::kDecode;
  std::string head = {};  // the message without its tensors, serialized
  absl::Span<const uint16_t> q = {};
  absl::Span<const uint16_t> k = {};
  absl::Span<const uint16_t> v = {};
  uint64_t items = 0;        // of a decode; of an append its layers
  uint64_t reply_bytes = 0;  // of out and lse, each rounded up to shm::kAlign
  int64_t timeout_ms = 0;    // for the server
  OutType out_type = OutType::kBf16;
};

// A decode's request but for its head, which only convert.h can make.
SharedMessage DecodeMessageOf(const DecodeArgs& args, int64_t timeout_ms);

// One request under way. Its fields belong to the session until Wait or TakeDone gave it back.
struct SharedCall {
  absl::Status status = {};
  std::optional<int64_t> pushback_ms = {};  // the delay that the server asks for
  DecodeReply reply = {};                   // of a decode that succeeded
  uint64_t id = 0;                          // the caller's

  // Where its rows lie in the session, for who has to send them again: until it is done, and after
  // Detach until LetGo.
  absl::Span<const uint16_t> q = {};
  absl::Span<const uint16_t> k = {};
  absl::Span<const uint16_t> v = {};

  // The session's own.
  shm::Kind kind = shm::Kind::kDecode;
  OutType out_type = OutType::kBf16;
  uint64_t at = 0;
  uint64_t bytes = 0;
  bool is_read = false;  // its reply is being read, or was
  bool is_done = false;
  bool is_detached = false;
  std::shared_ptr<std::deque<std::shared_ptr<SharedCall>>> inbox = {};
};
using SharedCallPtr = std::shared_ptr<SharedCall>;
// Done calls of one stream; guarded by their session's mutex.
using SharedInbox = std::deque<SharedCallPtr>;

class SharedSession {
 public:
  using Time = std::chrono::steady_clock::time_point;

  struct Place {
    std::string unix_socket;
    std::string ticket;
    uint64_t memory_bytes = 0;  // wanted
    int64_t spin_us = 0;
  };
  static absl::StatusOr<std::shared_ptr<SharedSession>> Open(const Place& place);
  ~SharedSession();
  SharedSession(const SharedSession&) = delete;
  SharedSession& operator=(const SharedSession&) = delete;

  // What a message takes of a session, its reply included.
  static uint64_t RoomFor(const SharedMessage& message);
  static uint64_t RoomFor(const DecodeArgs& args);  // at most, before there is a message
  static uint64_t RoomFor(uint64_t append_bytes);   // of k and v of one layer
  uint64_t bytes_max() const { return layout_.data_bytes; }
  // The session lives as long as they do; a later one copies them as it does others.
  static absl::StatusOr<SharedRows> MakeRows(std::shared_ptr<SharedSession> session,
                                             size_t elements);
  bool is_broken() const { return is_broken_.load(std::memory_order_acquire); }

  // Waits for room, `until` at the latest. INVALID_ARGUMENT: the message is larger than the
  // session.
  // inbox, where given, gets the call when it is done.
  absl::StatusOr<SharedCallPtr> Send(const SharedMessage& message, uint64_t id, Time until,
                                     std::shared_ptr<SharedInbox> inbox = nullptr);
  // False when it is not done by then; it goes on, and nobody hears of it.
  bool Wait(const SharedCallPtr& call, Time until);
  // False when the inbox is still empty by then.
  bool WaitForDone(const SharedInbox& inbox, Time until);
  // The next of the inbox; null when there is none.
  SharedCallPtr TakeDone(SharedInbox* inbox);
  // Takes all that is done out of the inbox. What is under way goes on unheard, and its memory
  // stays as it is until LetGo.
  SharedInbox Detach(const std::shared_ptr<SharedInbox>& inbox);
  void LetGo(SharedCall* call);

 private:
  SharedSession(int socket, const shm::Welcome& layout, uint8_t* memory, int64_t spin_us);

  // Where a decode's rows were copied to: the next one's go to the same place, when this one has
  // its reply, so whoever waits for that makes the lines its own again.
  struct Copied {
    const uint8_t* bytes = nullptr;
    uint64_t size = 0;
    uint32_t requests_tail = 0;  // the server has read them when it has taken so many
  };

  template <typename Ready>
  bool Await(std::unique_lock<std::mutex>& lock, Time until, const Ready& ready);
  void Lead(std::unique_lock<std::mutex>& lock, Time until);
  bool LookForReplies(Time until, Copied copied);
  bool HearSocket(Time until);
  void TakeReplies(std::unique_lock<std::mutex>& lock);
  void Convert(const shm::Reply& reply, SharedCall* call) const;
  void Finish(const SharedCallPtr& call);
  void BreakAll();
  bool IsInPlace(absl::Span<const uint16_t> tensor) const;
  uint64_t RoomLeftFor(const SharedMessage& message) const;  // but for what is in place
  void Copy(const SharedMessage& message, uint64_t at, shm::Request* request) const;
  uint32_t RepliesTail() const;

  const int socket_;
  const shm::Welcome layout_;
  uint8_t* const memory_;
  shm::Head* const head_;
  const int64_t spin_us_;
  std::atomic<bool> is_broken_{false};
  absl::Status broken_;  // the leader's until is_broken_ is set, then nobody changes it

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool has_leader_ = false;
  int waiters_ = 0;
  Arena arena_;
  uint64_t last_tag_ = 0;
  uint32_t requests_tail_ = 0;
  Copied copied_;              // of the latest decode
  uint32_t replies_head_ = 0;  // written by the leader
  uint32_t outstanding_ = 0;   // entries that are taken: no more than the ring has
  std::unordered_map<uint64_t, SharedCallPtr> calls_;  // by tag
};

}  // namespace fp8kvd::client
