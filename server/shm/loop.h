// server/shm/loop.h: one thread and the sessions that live on it: it takes their requests, copies
// and checks rows, writes replies, and rings bells. A session needs no lock.
//
// Promises: after work it looks on for spin_us, then sleeps until a bell, a hang-up, or something
//   posted. What was posted is seen: the thread says that it sleeps before its last look.
// Does not manage: who may have a session (door.h), what one does (session.h).
// Threads: Adopt, Post, Drain and Stop from any, the rest on its own. Stop returns when every
//   session is over, for which the engine must answer what it took.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "server/engine/fleet.h"
#include "server/engine/watch.h"
#include "server/ops/metrics.h"
#include "server/translate/catalog.h"

namespace fp8kvd::shm {

class Quota;
class Session;

// What every session reaches. Outlives them all.
struct Parts {
  const translate::Catalog* catalog = nullptr;
  engine::Fleet* fleet = nullptr;
  const engine::Clock* clock = nullptr;
  Quota* quota = nullptr;
  ops::MethodMetrics* decodes = nullptr;
  ops::MethodMetrics* appends = nullptr;
  int64_t inflight_max = 0;  // requests of a session taken and not yet answered
  int64_t spin_us = 0;
};

class Loop {
 public:
  // Something that comes back to the loop from another thread; one post of it at a time.
  class Posted {
   public:
    virtual void OnPosted() = 0;

   protected:
    virtual ~Posted() = default;

   private:
    friend class Loop;
    Posted* next_ = nullptr;
  };

  explicit Loop(const Parts* parts);
  ~Loop();  // after Stop
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  void Adopt(std::unique_ptr<Session> session);
  void Post(Posted* posted);
  // On its thread: the decodes whose end it looks for itself.
  engine::Watch& watch() { return watch_; }
  // On its thread: something was posted, or requests of sessions wait.
  bool HasWork() const;
  // On its thread: whether anything else waits for its turn than appends that are on their way.
  bool IsWanted() const { return HasWork() || !watch_.empty(); }
  // On its thread: nothing is heard of this session's socket any more.
  void Forget(int socket) const;
  // Sessions end when nothing of theirs is in flight.
  void Drain();
  // Sessions end now.
  void Stop();

  int64_t sessions() const { return sessions_count_.load(std::memory_order_relaxed); }
  const Parts& parts() const { return *parts_; }

 private:
  enum class State : uint8_t { kOpen, kDraining, kStopping };

  void Run();
  bool Turn();
  bool TakePosted();
  void TakeAdopted();
  void Tidy();
  void Sleep();
  void Look(int timeout_ms);
  void RingSelf() const;

  const Parts* const parts_;
  const int epoll_;
  const int bell_;
  std::atomic<Posted*> posted_{nullptr};  // newest first
  std::atomic<bool> is_asleep_{false};
  std::atomic<State> state_{State::kOpen};
  std::atomic<int64_t> sessions_count_{0};  // adopted ones included
  std::mutex mutex_;
  std::vector<std::unique_ptr<Session>> adopted_;  // guarded by mutex_
  std::vector<std::unique_ptr<Session>> sessions_;
  engine::Watch watch_;
  std::thread thread_;
};

}  // namespace fp8kvd::shm
