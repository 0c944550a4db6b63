// server/engine/admission.h: the door between the calls' threads and the engine's: a bounded queue.
//
// Promises: what Offer took is given out by TakeAll exactly once, in the order of the Offers. An
//   Offer is answered at once: taken, full (with a delay after which a retry can hope), or closed.
// Does not manage: deadlines and cancels (batcher.h looks at them before work begins); waking the
//   engine (doorbell.h).
// Threads: Offer from any, without a lock: one compare-and-swap. The rest from the engine's thread.
// Bounds: places_max items between Offer and GiveBack; a request takes a place for each of its
//   items. Of a tenant, inflight_items_max at a time and items_per_s_max in a second, on all
//   devices together; one that has nothing in the queue may send one message however large.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"

#include "config/options.h"
#include "server/engine/messages.h"

namespace fp8kvd::engine {

// UNAVAILABLE, for calls in flight and for later ones. What broke is for the log (Engine::Run
// returns it), not for clients.
absl::Status DeviceFailedError();

// What each tenant has in the queues of all devices, and may. From any thread.
struct TenantQueues {
  struct Tenant {
    std::atomic<int64_t> places_max{0};
    std::atomic<int64_t> item_ns{0};  // between items at the highest rate; 0: no bound
    std::atomic<int64_t> places_used{0};
    // When all that was sent so far would have come at the highest rate.
    std::atomic<int64_t> rate_ns{0};
    std::atomic<uint64_t> refused_total{0};
  };
  explicit TenantQueues(const std::vector<config::TenantOptions>& options);
  // What each may have from now on; as many as at first.
  void Set(const std::vector<config::TenantOptions>& options);

  std::vector<Tenant> tenants;
};

class Admission {
 public:
  Admission(int32_t places_max, std::shared_ptr<TenantQueues> queues);

  // From any thread.
  void SetTenants(const std::vector<config::TenantOptions>& tenants) { queues_->Set(tenants); }

  // Errors: RESOURCE_EXHAUSTED with request->retry_after_ms set; UNAVAILABLE once refused.
  absl::Status Offer(Request* request);

  // All that were offered since the last call, linked by book.next; null: none.
  Request* TakeAll();
  bool HasOffers() const;

  void GiveBack(const Request& request);  // its places
  // What the engine needs for an item at present; the advice to those refused rests on it.
  void SetItemUs(int64_t item_us) { item_us_.store(item_us, std::memory_order_relaxed); }

  // From any thread: no new work. What was offered before, or slips in beside it, is still taken.
  void Refuse(bool is_device_failed);
  bool is_refusing() const { return state_.load() != State::kOpen; }
  // After Refuse: as TakeAll, and nothing can slip in any more.
  Request* Close();

  int64_t places_used() const { return places_used_.load(std::memory_order_relaxed); }
  int64_t places_used(cache::TenantId tenant) const {
    return TenantOf(tenant).places_used.load(std::memory_order_relaxed);
  }
  uint64_t refused_total(cache::TenantId tenant) const {
    return TenantOf(tenant).refused_total.load(std::memory_order_relaxed);
  }
  uint64_t refused_total() const { return refused_total_.load(std::memory_order_relaxed); }

 private:
  enum class State : uint8_t { kOpen, kDraining, kFailed };

  TenantQueues::Tenant& TenantOf(cache::TenantId tenant) const {
    return tenants_[static_cast<uint32_t>(tenant)];
  }
  TenantQueues::Tenant& TenantOf(const Request& request) const { return TenantOf(request.tenant); }
  absl::Status TakePlaces(Request* request, int32_t places);
  absl::Status CountRate(Request* request, int32_t places);
  void GiveBack(const Request& request, int32_t places);
  absl::Status Refusal(Request* request);
  absl::Status Full(Request* request, int64_t mine);
  static Request* InOrder(Request* newest);

  const int32_t places_max_;
  const std::shared_ptr<TenantQueues> queues_;
  TenantQueues::Tenant* const tenants_;     // in queues_, one hop less
  std::atomic<Request*> newest_{nullptr};   // a stack by book.next, or kClosed
  std::atomic<State> state_{State::kOpen};  // in one order with newest_ and the doorbell
  std::atomic<int64_t> places_used_{0};
  std::atomic<int64_t> item_us_{0};
  std::atomic<uint64_t> refused_total_{0};
};

}  // namespace fp8kvd::engine
