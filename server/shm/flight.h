// server/shm/flight.h: one request on its way through: its head copied and read, its rows copied
// once into a staging slot and checked there, given to the engine, answered into the client's
// memory. The checks are those of translate, as for gRPC.
//
// Life: Load (of an append: and ContinueLoad until nothing is left), then Submit, then (by the
//   loop) OnPosted, then Finish, which gives the slot back. Drop instead of Submit gives back what
//   Load took. Threads: the loop's, but Done.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "proto/fp8kvd/v1/shared_memory.h"
#include "server/engine/fleet.h"
#include "server/engine/spread.h"
#include "server/shm/loop.h"
#include "server/translate/requests.h"

namespace fp8kvd::shm {

class Session;

// A request as the ring gave it, and when.
struct Taken {
  Request request;
  engine::TimeUs arrived = 0;
};

// Where a request's parts lie in the client's memory, which may change under every read.
struct Rooms {
  absl::Span<const uint8_t> head;
  translate::Beside tensors;
  absl::Span<uint8_t> reply;
};

// What goes into the Reply, places counted from the room's beginning.
struct Answer {
  absl::Status status;
  uint64_t head_at = 0;
  uint64_t head_bytes = 0;
  uint64_t out_bytes = 0;
  uint64_t lse_at = 0;
  uint64_t lse_bytes = 0;
};

// The answer of a request that failed as a whole; as much of its text as the room takes.
Answer AnswerError(const absl::Status& status, int32_t retry_after_ms, absl::Span<uint8_t> room);

// What both kinds have.
class Flight : public engine::Completion, public Loop::Posted {
 public:
  explicit Flight(Session* session, Loop* loop) : session_(session), loop_(loop) {}
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;

  void Done() final { loop_->Post(this); }

  const Taken& taken() const { return taken_; }
  int32_t retry_after_ms() const { return retry_after_ms_; }

 protected:
  const Parts& parts() const { return loop_->parts(); }
  Session* session() const { return session_; }
  // Copies the head, where nobody writes any more.
  translate::Piece CopyHead(const Taken& taken, const Rooms& rooms);
  Loop* loop() const { return loop_; }
  // What the engines have to know of it besides the message; it is staged now.
  engine::Sender SenderWith(uint32_t timeout_ms);

  int32_t retry_after_ms_ = 0;

 private:
  Session* const session_;
  Loop* const loop_;
  Taken taken_;
  std::string head_;
};

class DecodeFlight final : public Flight {
 public:
  DecodeFlight(Session* session, Loop* loop)
      : Flight(session, loop), spread_(loop->parts().fleet) {}

  absl::Status Load(const Taken& taken, const Rooms& rooms);
  absl::Status Submit();
  // Once submitted: gives the device's part of the slots out of this processor's cache.
  void PassTensors() const;
  Answer Finish(absl::Span<uint8_t> room);
  void Cancel() { spread_.Cancel(); }
  void OnPosted() override;

  bool is_running() const { return is_running_; }

 private:
  void NoteEnd();

  translate::DecodeMessage message_;
  engine::DecodeSpread spread_;
  bool is_running_ = false;
};

class AppendFlight final : public Flight {
 public:
  using Flight::Flight;
  ~AppendFlight() override;

  // Checks the head and takes a slot. RESOURCE_EXHAUSTED: none is free now; may be tried again.
  absl::Status Load(const Taken& taken, const Rooms& rooms);
  // Copies and checks a part of the rows; true: more is left. An error has dropped it.
  absl::StatusOr<bool> ContinueLoad();
  absl::Status Submit();
  Answer Finish(absl::Span<uint8_t> room);
  void Cancel() { message_.request().cancelled.store(true, std::memory_order_relaxed); }
  void OnPosted() override;
  void Drop();

 private:
  engine::Engine& engine() const;  // of the message's sequence

  translate::AppendMessage message_;
  std::optional<engine::StagingSlot> slot_;
};

}  // namespace fp8kvd::shm
