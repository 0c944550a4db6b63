// server/rpc/poller.h: one completion queue and the one thread that empties it. Every call lives on
// one poller: all its events run there, so a call needs no lock.
//
// Promises: an Event that was handed to gRPC as a tag runs once, on this poller's thread. Post
//   makes an object's OnPosted run there too, in the order of the posts; it takes no memory and no
//   lock, and of posts that come together only the first wakes the thread. Before the thread sleeps
//   it looks, for a bounded time: for the end of decodes that it sent (engine/watch.h), and for
//   what soon follows its last event.
// Does not manage: what events mean (the calls); starting and joining its thread (server.h).
// Threads: Post from any; the rest from the thread of Run.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>

#include "grpcpp/alarm.h"
#include "grpcpp/completion_queue.h"

#include "server/engine/watch.h"

namespace fp8kvd::rpc {

// What a completion queue hands back for one finished operation.
class Event {
 public:
  virtual void Ready(bool ok) = 0;

 protected:
  ~Event() = default;
};

// An event that calls a member of its owner.
template <typename Owner>
class MemberEvent final : public Event {
 public:
  MemberEvent(Owner* owner, void (Owner::*member)(bool ok)) : owner_(owner), member_(member) {}
  MemberEvent(const MemberEvent&) = delete;
  MemberEvent& operator=(const MemberEvent&) = delete;
  void Ready(bool ok) override { (owner_->*member_)(ok); }

 private:
  Owner* const owner_;
  void (Owner::*const member_)(bool ok);
};

// Something that comes back to a poller from another thread; one post of it at a time.
class Posted {
 public:
  virtual void OnPosted() = 0;

 protected:
  virtual ~Posted() = default;

 private:
  friend class Poller;
  Posted* next_ = nullptr;
};

class Poller final : private Event {
 public:
  // fleet: on which its calls decode; null: on none.
  explicit Poller(std::unique_ptr<grpc::ServerCompletionQueue> queue,
                  const engine::Fleet* fleet = nullptr);
  ~Poller();  // after Run returned
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  grpc::ServerCompletionQueue* queue() { return queue_.get(); }

  // Hands out events until Close, and those that are on their way then.
  void Run();

  // Nothing may be posted that could come behind Close.
  void Post(Posted* posted);

  // On this thread: shuts the queue down, as soon as no wake-up is on its way. A poster may still
  // be inside Post, its object taken already: it finds nobody asleep and leaves the queue alone.
  void Close();

  // On this thread: one more, or one less, thing was handed away that soon comes back by Post.
  void Expect(int change) { expected_ += change; }
  // On this thread: the decodes whose end it looks for itself.
  engine::Watch& watch() { return watch_; }
  // On this thread: whether it had nothing to do before its last event. Else more events may wait,
  // and it cannot look for the end of anything meanwhile.
  bool has_waited() const { return has_waited_; }

 private:
  using Clock = std::chrono::steady_clock;

  friend class PollerPeer;  // of the test, which stops a poster between Push and Wake

  void Push(Posted* posted);
  void Wake();
  void Ready(bool ok) override;  // the wake-up
  // As NextStatus of a completion queue; TIMEOUT: nothing has come soon.
  grpc::CompletionQueue::NextStatus Look(void** tag, bool* ok);
  bool LookUntil(Clock::time_point end) const;
  std::chrono::microseconds Patience() const;
  bool NextEvent(void** tag, bool* ok);
  bool IsPosted() const { return posted_.load(std::memory_order_relaxed) != nullptr; }
  void TakePosted();

  const std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  engine::Watch watch_;
  int expected_ = 0;
  bool has_waited_ = false;
  std::atomic<Posted*> posted_{nullptr};  // newest first
  // Set by this thread before it sleeps. Who clears it, wakes: a poster by the alarm, whose event
  // is then on its way, or this thread itself.
  std::atomic<bool> is_asleep_{false};
  bool alarm_is_set_ = false;  // as far as this thread knows
  bool is_closing_ = false;    // never asleep again
  grpc::Alarm alarm_;
};

}  // namespace fp8kvd::rpc
