// server/rpc/job.h: one message from its bytes to its answer: read and checked, loaded into
// staging, given to the engine (or another thread), answered. A call owns its jobs; a job comes
// back to its call's poller as one event.
//
// Life: Begin; then, if it said kLater, the owner's OnWork, exactly once; then Answer, once, which
// gives back everything that the job held. Then Begin may be called again. Threads: all on the
// poller, but Done, which a turn of the engine calls.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "grpcpp/support/byte_buffer.h"

#include "config/base/limits.h"
#include "server/engine/fleet.h"
#include "server/engine/messages.h"
#include "server/engine/spread.h"
#include "server/rpc/poller.h"
#include "server/shm/tickets.h"
#include "server/translate/catalog.h"

namespace fp8kvd::rpc {

class Copiers;
class HelperThread;
class Tokens;
struct Planner;

// What every call reaches. Outlives all calls.
struct Parts {
  const translate::Catalog* catalog = nullptr;
  engine::Fleet* fleet = nullptr;
  const engine::Clock* clock = nullptr;
  Copiers* copiers = nullptr;
  HelperThread* planning = nullptr;
  HelperThread* measuring = nullptr;
  const Planner* planner = nullptr;
  shm::TicketBook* tickets = nullptr;  // null: no same-host transport
  const Tokens* tokens = nullptr;      // null: nobody needs one, all are tenant 0
  int64_t calls_max = 0;               // open at a time, those of anyone aside
  int64_t calls_per_tenant_max = 0;
  int32_t stream_inflight_max = 0;  // messages of a DecodeStream read and not yet answered
  // Once set: nothing listens for calls any more.
  std::atomic<bool> stopping{false};
  std::atomic<bool> draining{false};  // new work is refused, streams end when they are idle
  std::atomic<int64_t> calls_open{0};
  std::atomic<int64_t> calls_of_anyone_open{0};  // of those, such as nobody needs a token for
  // [tenants] of them; only counted where there are tokens.
  std::array<std::atomic<int64_t>, kTenantsMax> tenant_calls_open{};
};

// Whose message it is, when it came, and how long it may take.
struct Arrival {
  cache::TenantId tenant{0};
  engine::TimeUs arrived = 0;
  engine::TimeUs deadline = engine::kNoDeadline;
};

class Work;

class WorkOwner {
 public:
  virtual void OnWork(Work* work) = 0;
  // It came back and goes on: what it waited for first is done.
  virtual void OnGoesOn(Work*) {}

 protected:
  ~WorkOwner() = default;
};

// What another thread does for a call, and how it comes back.
class Work : public engine::Completion, public Posted {
 public:
  Work(const Parts* parts, Poller* poller, WorkOwner* owner)
      : parts_(parts), poller_(poller), owner_(owner) {}
  ~Work() override = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  // The client has gone; only while OnWork is still to come.
  virtual void Cancel() {}

  // Advice that goes with a RESOURCE_EXHAUSTED; 0: none.
  int32_t retry_after_ms() const { return retry_after_ms_; }

  void Done() final { poller_->Post(this); }
  void OnPosted() final {
    if (is_expected_) poller_->Expect(-1);
    is_expected_ = false;
    if (GoesOn()) {
      Expect();
      owner_->OnGoesOn(this);
    } else {
      owner_->OnWork(this);
    }
  }

 protected:
  const Parts& parts() const { return *parts_; }
  Poller& poller() const { return *poller_; }

  // More was given to another thread, so the work comes back once more.
  virtual bool GoesOn() { return false; }

  // What the engines have to know of a message besides itself; it is staged now.
  engine::Sender SenderOf(const Arrival& arrival) {
    return {.done = this,
            .tenant = arrival.tenant,
            .arrived = arrival.arrived,
            .staged = parts_->clock->NowUs(),
            .deadline = arrival.deadline};
  }
  // The work was given to another thread and comes back soon.
  void Expect() {
    is_expected_ = true;
    poller_->Expect(1);
  }

  int32_t retry_after_ms_ = 0;

 private:
  const Parts* const parts_;
  Poller* const poller_;
  WorkOwner* const owner_;
  bool is_expected_ = false;  // back from another thread, soon
};

// A message that gets a reply of its own.
class Job : public Work {
 public:
  enum class Next : uint8_t { kAnswer, kLater };
  using Work::Work;

  // Takes the bytes out of `message`.
  virtual Next Begin(grpc::ByteBuffer* message, const Arrival& arrival) = 0;
  // The reply, or why there is none.
  virtual absl::Status Answer(grpc::ByteBuffer* reply) = 0;
};

}  // namespace fp8kvd::rpc
