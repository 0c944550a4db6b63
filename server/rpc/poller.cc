#include "server/rpc/poller.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "config/base/check.h"

namespace fp8kvd::rpc {
namespace {

using std::chrono::microseconds;

// How long a poller looks before it sleeps: for the end of a launch that it watches, for what
// another thread has of it, and for the next message of a client that has just been answered. Being
// woken takes 10 to 20 us on a virtual machine, and the waker 3 to 5.
constexpr microseconds kLaunchPatience(100);
constexpr microseconds kPatience(15);
constexpr microseconds kIdlePatience(50);
// A look at gRPC's queue costs about a microsecond, one at a launch a fifth of it.
constexpr microseconds kBetweenLooks(5);

}  // namespace

Poller::Poller(std::unique_ptr<grpc::ServerCompletionQueue> queue, const engine::Fleet* fleet)
    : queue_(std::move(queue)), watch_(fleet) {}

Poller::~Poller() { FP8KVD_CHECK(posted_.load() == nullptr); }

void Poller::Run() {
  void* tag = nullptr;
  bool ok = false;
  while (NextEvent(&tag, &ok)) {
    static_cast<Event*>(tag)->Ready(ok);
    TakePosted();
  }
}

std::chrono::microseconds Poller::Patience() const {
  if (!watch_.empty()) return kLaunchPatience;
  if (expected_ > 0) return kPatience;
  return watch_.may_look_on() ? kIdlePatience : std::chrono::microseconds(0);
}

// For the end of decodes and for posts, until the queue's next turn. False: `end` has come.
bool Poller::LookUntil(Clock::time_point end) const {
  Clock::time_point now = Clock::now();
  if (now >= end) return false;
  const Clock::time_point queues_turn = std::min(end, now + kBetweenLooks);
  do {
    watch_.LookOn();
    std::this_thread::yield();
    now = Clock::now();
  } while (expected_ > 0 && now < queues_turn && !IsPosted());
  return true;
}

grpc::CompletionQueue::NextStatus Poller::Look(void** tag, bool* ok) {
  has_waited_ = false;
  if (Patience().count() == 0 && !IsPosted()) {
    has_waited_ = true;
    return grpc::CompletionQueue::TIMEOUT;
  }
  Clock::time_point end = Clock::now() + Patience();
  do {
    if (IsPosted()) {
      TakePosted();
      end = Clock::now() + Patience();
    }
    const auto status = queue_->AsyncNext(tag, ok, gpr_inf_past(GPR_CLOCK_MONOTONIC));
    if (status != grpc::CompletionQueue::TIMEOUT) return status;
    has_waited_ = true;
  } while (IsPosted() || LookUntil(end));
  return grpc::CompletionQueue::TIMEOUT;
}

bool Poller::NextEvent(void** tag, bool* ok) {
  for (;;) {
    const auto status = Look(tag, ok);
    if (status != grpc::CompletionQueue::TIMEOUT) {
      return status == grpc::CompletionQueue::GOT_EVENT;
    }
    watch_.LookAway();
    if (!alarm_is_set_ && !is_closing_) {
      is_asleep_.store(true);
      if (posted_.load() != nullptr) {
        alarm_is_set_ = !is_asleep_.exchange(false);
        continue;
      }
    }
    const bool is_open = queue_->Next(tag, ok);
    if (!alarm_is_set_ && !is_closing_) alarm_is_set_ = !is_asleep_.exchange(false);
    return is_open;
  }
}

void Poller::Post(Posted* posted) {
  Push(posted);
  Wake();
}

void Poller::Push(Posted* posted) {
  Posted* before = posted_.load(std::memory_order_relaxed);
  do {
    posted->next_ = before;
  } while (!posted_.compare_exchange_weak(before, posted));
}

void Poller::Wake() {
  if (is_asleep_.exchange(false)) {
    // Long past: gRPC rounds the present up to its next millisecond.
    alarm_.Set(queue_.get(), gpr_inf_past(GPR_CLOCK_MONOTONIC), static_cast<Event*>(this));
  }
}

void Poller::Ready(bool) {
  alarm_is_set_ = false;
  if (is_closing_) queue_->Shutdown();
}

void Poller::Close() {
  is_closing_ = true;
  if (!alarm_is_set_) queue_->Shutdown();
}

void Poller::TakePosted() {
  if (posted_.load(std::memory_order_relaxed) == nullptr) return;
  Posted* newest = posted_.exchange(nullptr, std::memory_order_acquire);
  Posted* oldest = nullptr;
  while (newest != nullptr) {
    Posted* const next = newest->next_;
    newest->next_ = oldest;
    oldest = newest;
    newest = next;
  }
  while (oldest != nullptr) {
    Posted* const next = oldest->next_;  // OnPosted may post it again, or end it
    oldest->OnPosted();
    oldest = next;
  }
}

}  // namespace fp8kvd::rpc
