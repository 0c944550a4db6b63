#include "server/rpc/poller.h"

#include <chrono>
#include <thread>
#include <utility>

#include "config/base/check.h"

namespace fp8kvd::rpc {

Poller::Poller(std::unique_ptr<grpc::ServerCompletionQueue> queue) : queue_(std::move(queue)) {}

Poller::~Poller() { FP8KVD_CHECK(posted_.load() == nullptr); }

void Poller::Run() {
  void* tag = nullptr;
  bool ok = false;
  while (NextEvent(&tag, &ok)) {
    static_cast<Event*>(tag)->Ready(ok);
    TakePosted();
  }
}

bool Poller::NextEvent(void** tag, bool* ok) {
  if (expected_ > 0 && posted_.load(std::memory_order_relaxed) == nullptr) {
    const auto status = queue_->AsyncNext(tag, ok, gpr_inf_past(GPR_CLOCK_MONOTONIC));
    if (status != grpc::CompletionQueue::TIMEOUT) {
      return status == grpc::CompletionQueue::GOT_EVENT;
    }
    using Clock = std::chrono::steady_clock;
    const Clock::time_point until = Clock::now() + std::chrono::microseconds(kSpinUs);
    while (posted_.load(std::memory_order_relaxed) == nullptr && Clock::now() < until) {
      std::this_thread::yield();
    }
  }
  TakePosted();
  for (;;) {
    if (!alarm_is_set_ && !is_closing_) {
      is_asleep_.store(true);
      if (posted_.load() != nullptr) {
        alarm_is_set_ = !is_asleep_.exchange(false);
        TakePosted();
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
