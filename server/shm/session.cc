#include "server/shm/session.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "config/base/check.h"
#include "proto/fp8kvd/v1/shared_lines.h"
#include "server/shm/packets.h"
#include "server/shm/quota.h"

namespace fp8kvd::shm {

Session::Session(Loop* loop, std::unique_ptr<Memory> memory, int socket, cache::TenantId tenant)
    : loop_(loop),
      memory_(std::move(memory)),
      socket_(socket),
      tenant_(tenant),
      ring_(memory_->layout(), memory_->bytes()),
      appends_{AppendFlight(this, loop), AppendFlight(this, loop)} {}

Session::~Session() {
  FP8KVD_CHECK(inflight_ == 0);
  close(socket_);
  const auto bytes = static_cast<int64_t>(memory_->layout().memory_bytes);
  loop_->parts().quota->GiveBack(tenant_, bytes, has_lied_);
}

bool Session::HasRoom() const { return inflight_ < loop_->parts().inflight_max; }

bool Session::HasWork() const { return !has_ended_ && HasRoom() && ring_.HasWork(); }

bool Session::Work() {
  bool has_worked = false;
  Taken taken;
  for (int i = 0; i < kTakeMax && !has_ended_ && HasRoom(); ++i) {
    const absl::StatusOr<bool> was_taken = ring_.Take(&taken.request);
    if (!was_taken.ok()) {
      has_lied_ = true;
      End(was_taken.status());
      return true;
    }
    if (!*was_taken) break;
    taken.arrived = loop_->parts().clock->NowUs();
    ++inflight_;
    Begin(taken);
    ring_.PublishTaken();
    has_worked = true;
  }
  has_worked |= ContinueAppends();
  return Publish() || has_worked;
}

bool Session::Publish() {
  if (!std::exchange(has_unpublished_, false)) return false;
  ring_.Publish();
  if (ring_.TakeClientSleeps()) Bell();
  return true;
}

void Session::Begin(const Taken& taken) {
  if (taken.request.kind == Kind::kDecode) {
    BeginDecode(taken);
  } else {
    appends_waiting_.push_back(taken);
  }
}

Rooms Session::RoomsOf(const Request& request) const {
  const auto part = [this](uint64_t at, uint64_t bytes) {
    return absl::MakeSpan(ring_.Data(at), bytes);
  };
  return {.head = part(request.head_at, request.head_bytes),
          .tensors = {.q = part(request.q_at, request.q_bytes),
                      .k = part(request.k_at, request.k_bytes),
                      .v = part(request.v_at, request.v_bytes)},
          .reply = part(request.reply_at, request.reply_bytes)};
}

DecodeFlight* Session::TakeDecode() {
  if (idle_decodes_.empty()) {
    decodes_.push_back(std::make_unique<DecodeFlight>(this, loop_));
    return decodes_.back().get();
  }
  DecodeFlight* const flight = idle_decodes_.back();
  idle_decodes_.pop_back();
  return flight;
}

void Session::BeginDecode(const Taken& taken) {
  DecodeFlight* const flight = TakeDecode();
  const Rooms rooms = RoomsOf(taken.request);
  absl::Status status = flight->Load(taken, rooms);
  if (status.ok()) status = flight->Submit();
  if (status.ok()) {
    // While the device begins and works; the client has read the reply that was there before.
    if (!loop_->HasWork()) flight->PassTensors();
    return OwnLines(rooms.reply.data(), rooms.reply.size());
  }
  Put(taken, AnswerError(status, flight->retry_after_ms(), rooms.reply));
  idle_decodes_.push_back(flight);
}

void Session::OnDone(DecodeFlight* flight) {
  const absl::Span<uint8_t> room = RoomsOf(flight->taken().request).reply;
  const Answer answer = flight->Finish(room);
  Put(flight->taken(), answer);
  idle_decodes_.push_back(flight);
  Publish();  // the next turn of this session may come behind another one's rows
  if (!loop_->IsWanted()) PassLines(room.data(), answer.out_bytes);
}

// Whether one that waited has got its slot.
bool Session::BeginAppend() {
  waits_for_slot_ = false;
  while (!appends_waiting_.empty() && append_ready_ == nullptr && !has_ended_) {
    AppendFlight* const flight = append_running_ == &appends_[0] ? &appends_[1] : &appends_[0];
    const Taken taken = appends_waiting_.front();
    const Rooms rooms = RoomsOf(taken.request);
    const absl::Status status = flight->Load(taken, rooms);
    const uint32_t timeout_ms = taken.request.timeout_ms;
    const int64_t waited_us = loop_->parts().clock->NowUs() - taken.arrived;
    const bool is_late = timeout_ms != 0 && waited_us >= int64_t{timeout_ms} * 1000;
    if (absl::IsResourceExhausted(status) && !is_late) {
      waits_for_slot_ = true;
      return false;
    }
    appends_waiting_.pop_front();
    if (status.ok()) {
      append_loading_ = flight;
      return true;
    }
    Put(taken, AnswerError(status, flight->retry_after_ms(), rooms.reply));
  }
  return false;
}

// The next one is copied and checked while one runs; a few parts in a turn, and none once anything
// else waits, so that a decode of another session waits for a part and not for a prompt. True:
// something was done.
bool Session::ContinueAppends() {
  if (append_loading_ == nullptr && !BeginAppend()) return false;
  absl::StatusOr<bool> has_more = append_loading_->ContinueLoad();
  for (int i = 1; i < kPartsMax && has_more.ok() && *has_more && !loop_->IsWanted(); ++i) {
    has_more = append_loading_->ContinueLoad();
  }
  if (has_more.ok() && *has_more) return true;
  AppendFlight* const flight = std::exchange(append_loading_, nullptr);
  if (has_more.ok()) {
    append_ready_ = flight;
    if (append_running_ == nullptr) RunNextAppend();
  } else {
    Put(flight->taken(), AnswerError(has_more.status(), flight->retry_after_ms(),
                                     RoomsOf(flight->taken().request).reply));
  }
  return true;
}

void Session::RunNextAppend() {
  append_running_ = std::exchange(append_ready_, nullptr);
  AppendFlight* const flight = append_running_;
  const absl::Status status = flight->Submit();
  if (status.ok()) return;
  append_running_ = nullptr;
  Put(flight->taken(),
      AnswerError(status, flight->retry_after_ms(), RoomsOf(flight->taken().request).reply));
}

void Session::OnDone(AppendFlight* flight) {
  append_running_ = nullptr;
  Put(flight->taken(), flight->Finish(RoomsOf(flight->taken().request).reply));
  if (append_ready_ != nullptr) RunNextAppend();
}

void Session::Put(const Taken& taken, const Answer& answer) {
  --inflight_;
  const Request& request = taken.request;
  ring_.Put({.tag = request.tag,
             .code = static_cast<uint32_t>(answer.status.code()),
             .head_at = request.reply_at + answer.head_at,
             .head_bytes = answer.head_bytes,
             .out_at = request.reply_at,
             .out_bytes = answer.out_bytes,
             .lse_at = request.reply_at + answer.lse_at,
             .lse_bytes = answer.lse_bytes});
  // After the farewell nothing is said: what was cancelled with the session would look like an
  // answer to a client that has not heard it yet, and would not be sent again.
  has_unpublished_ = !has_ended_;
  const Parts& parts = loop_->parts();
  ops::MethodMetrics* const metrics = request.kind == Kind::kDecode ? parts.decodes : parts.appends;
  metrics->Observe(static_cast<int>(answer.status.code()), parts.clock->NowUs() - taken.arrived);
}

void Session::OnSocket() {
  char bytes[64];
  // Bells mean nothing here: whoever wakes looks at the ring. A bound, against one who never stops.
  for (int i = 0; i < kTakeMax; ++i) {
    const ssize_t got = recv(socket_, bytes, sizeof(bytes), MSG_DONTWAIT);
    if (got > 0) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
    End(absl::CancelledError("the client has gone"));
    return;
  }
}

void Session::EndForDrain() {
  End(absl::UnavailableError("the server drains; connect again, then see your handles"));
}

void Session::End(const absl::Status& reason) {
  if (has_ended_) return;
  has_ended_ = true;
  if (std::exchange(has_unpublished_, false)) ring_.Publish();
  // Unread bells would make close an error at the other end, in front of the farewell.
  shutdown(socket_, SHUT_RD);
  char bytes[64];
  while (recv(socket_, bytes, sizeof(bytes), MSG_DONTWAIT) > 0) {
  }
  SendFarewell(socket_, reason);
  shutdown(socket_, SHUT_WR);
  loop_->Forget(socket_);
  for (const std::unique_ptr<DecodeFlight>& flight : decodes_) {
    if (flight->is_running()) flight->Cancel();
  }
  if (append_running_ != nullptr) append_running_->Cancel();
  for (AppendFlight** const flight : {&append_loading_, &append_ready_}) {
    if (*flight == nullptr) continue;
    std::exchange(*flight, nullptr)->Drop();
    --inflight_;
  }
  inflight_ -= static_cast<int64_t>(appends_waiting_.size());
  appends_waiting_.clear();
  waits_for_slot_ = false;
}

void Session::Bell() const {
  const char bell = 0;
  // A full socket has bells enough; one that is gone shows by its hang-up.
  (void)send(socket_, &bell, sizeof(bell), MSG_DONTWAIT | MSG_NOSIGNAL);
}

}  // namespace fp8kvd::shm
