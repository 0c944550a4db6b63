// server/shm/session.h: one client's session: requests from its ring become requests of the engine,
// answers become replies in its memory.
//
// Promises: every request taken is answered once, in any order; appends run one after the other, in
//   their order. When the client hangs up or breaks the contract its work is cancelled and the
//   session is over as soon as the engine has let go of it: nothing of it stays, nobody else is
//   disturbed. Its bytes of staging memory are those of two appends and inflight_max decodes.
// Does not manage: what a request must be (translate and the engine, as for gRPC).
// Threads: its loop's.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"

#include "server/shm/flight.h"
#include "server/shm/loop.h"
#include "server/shm/memory.h"
#include "server/shm/ring.h"

namespace fp8kvd::shm {

class Session {
 public:
  // Takes the socket over. The quota was taken for memory->layout().memory_bytes.
  Session(Loop* loop, std::unique_ptr<Memory> memory, int socket, cache::TenantId tenant);
  ~Session();  // is_over
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Takes requests, publishes replies; true: something was done.
  bool Work();
  bool HasWork() const;
  void Sleep() { ring_.Sleep(); }
  void Wake() { ring_.Wake(); }
  void OnSocket();  // there is something to read, or the client has gone
  void OnDone(DecodeFlight* flight);
  void OnDone(AppendFlight* flight);
  void EndForDrain();

  int socket() const { return socket_; }
  cache::TenantId tenant() const { return tenant_; }
  bool waits_for_slot() const { return waits_for_slot_; }
  bool is_idle() const { return inflight_ == 0 && !ring_.HasWork(); }
  bool is_over() const { return has_ended_ && inflight_ == 0; }

 private:
  // Requests taken in one turn, and parts of an append copied: then others have theirs.
  static constexpr int kTakeMax = 16;
  static constexpr int kPartsMax = 4;

  bool HasRoom() const;
  bool Publish();
  void Begin(const Taken& taken);
  void BeginDecode(const Taken& taken);
  bool BeginAppend();
  bool ContinueAppends();
  void RunNextAppend();
  void Put(const Taken& taken, const Answer& answer);
  void End(const absl::Status& reason);
  void Bell() const;
  DecodeFlight* TakeDecode();
  Rooms RoomsOf(const Request& request) const;

  Loop* const loop_;
  const std::unique_ptr<Memory> memory_;
  const int socket_;
  const cache::TenantId tenant_;
  Ring ring_;
  int64_t inflight_ = 0;  // taken and not yet answered
  bool has_ended_ = false;
  bool has_lied_ = false;
  bool has_unpublished_ = false;
  bool waits_for_slot_ = false;
  std::vector<std::unique_ptr<DecodeFlight>> decodes_;  // all
  std::vector<DecodeFlight*> idle_decodes_;
  std::deque<Taken> appends_waiting_;
  std::array<AppendFlight, 2> appends_;
  AppendFlight* append_running_ = nullptr;
  AppendFlight* append_loading_ = nullptr;  // on its way into its slot
  AppendFlight* append_ready_ = nullptr;    // in its slot, runs next
};

}  // namespace fp8kvd::shm
