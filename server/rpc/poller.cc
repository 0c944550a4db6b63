#include "server/rpc/poller.h"

#include <utility>

#include "config/base/check.h"

namespace fp8kvd::rpc {

Poller::Poller(std::unique_ptr<grpc::ServerCompletionQueue> queue) : queue_(std::move(queue)) {}

Poller::~Poller() { FP8KVD_CHECK(posted_.load() == nullptr); }

void Poller::Run() {
  void* tag = nullptr;
  bool ok = false;
  while (queue_->Next(&tag, &ok)) static_cast<Event*>(tag)->Ready(ok);
}

void Poller::Post(Posted* posted) {
  Posted* before = posted_.load(std::memory_order_relaxed);
  do {
    posted->next_ = before;
  } while (!posted_.compare_exchange_weak(before, posted, std::memory_order_release,
                                          std::memory_order_relaxed));
  if (before == nullptr) {
    // A time long past fires at once; the present is rounded up to gRPC's next millisecond.
    alarm_.Set(queue_.get(), gpr_inf_past(GPR_CLOCK_MONOTONIC), static_cast<Event*>(this));
  }
}

void Poller::Ready(bool) {
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
