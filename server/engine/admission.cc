#include "server/engine/admission.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace fp8kvd::engine {
namespace {

// Advice to wait longer than this would outlive the burst that caused it.
constexpr int64_t kRetryMsMax = 10'000;
constexpr int64_t kSecondNs = 1'000'000'000;
constexpr int64_t kBurstNs = kSecondNs / 2;

// Stands in the stack for "closed"; never dereferenced.
Request* ClosedMark() {
  static ControlRequest mark(ControlRequest::Op::kList);
  return &mark;
}

int32_t PlacesOf(const Request& request) {
  switch (request.kind) {
    case Request::Kind::kDecode:
      return std::max<int32_t>(
          1, static_cast<int32_t>(static_cast<const DecodeRequest&>(request).items.size()));
    case Request::Kind::kAppend:
      return static_cast<const AppendRequest&>(request).layers_count;
    case Request::Kind::kControl:
      return std::max<int32_t>(
          1, static_cast<int32_t>(static_cast<const ControlRequest&>(request).handles.size()));
  }
  return 1;
}

}  // namespace

absl::Status DeviceFailedError() {
  return absl::UnavailableError(
      "the device failed and the server ends; reconnect, then create the sequences anew");
}

TenantQueues::TenantQueues(const std::vector<config::TenantOptions>& options)
    : tenants(options.size()) {
  Set(options);
}

void TenantQueues::Set(const std::vector<config::TenantOptions>& options) {
  for (size_t i = 0; i < options.size(); ++i) {
    const int32_t rate = options[i].items_per_s_max;
    tenants[i].places_max = options[i].inflight_items_max;
    tenants[i].item_ns = rate > 0 ? kSecondNs / rate : 0;
  }
}

Admission::Admission(int32_t places_max, std::shared_ptr<TenantQueues> queues)
    : places_max_(places_max), queues_(std::move(queues)), tenants_(queues_->tenants.data()) {}

absl::Status Admission::Refusal(Request* request) {
  refused_total_.fetch_add(1, std::memory_order_relaxed);
  TenantOf(*request).refused_total.fetch_add(1, std::memory_order_relaxed);
  return state_.load() == State::kFailed
             ? DeviceFailedError()
             : absl::UnavailableError("the server drains and takes no new work; use another one");
}

absl::Status Admission::Full(Request* request, int64_t mine) {
  refused_total_.fetch_add(1, std::memory_order_relaxed);
  TenantOf(*request).refused_total.fetch_add(1, std::memory_order_relaxed);
  const int64_t queue_us = places_used() * item_us_.load(std::memory_order_relaxed);
  request->retry_after_ms =
      static_cast<int32_t>(std::clamp<int64_t>(queue_us / 1000, 1, kRetryMsMax));
  return absl::ResourceExhaustedError(absl::StrCat(
      PlacesOf(*request), " items were sent while ", mine, " of yours wait or run, and the queue ",
      "holds ", TenantOf(*request).places_max.load(), "; try again in ", request->retry_after_ms,
      " ms"));
}

void Admission::GiveBack(const Request& request, int32_t places) {
  TenantOf(request).places_used.fetch_sub(places, std::memory_order_relaxed);
  places_used_.fetch_sub(places, std::memory_order_relaxed);
}

void Admission::GiveBack(const Request& request) { GiveBack(request, request.book.places); }

absl::Status Admission::TakePlaces(Request* request, int32_t places) {
  TenantQueues::Tenant& tenant = TenantOf(*request);
  const int64_t mine = tenant.places_used.fetch_add(places, std::memory_order_relaxed);
  const int64_t all = places_used_.fetch_add(places, std::memory_order_relaxed);
  if (mine > 0 && mine + places > tenant.places_max) {
    GiveBack(*request, places);
    return Full(request, mine);
  }
  if (all + places > places_max_) {
    GiveBack(*request, places);
    return Full(request, mine);
  }
  return absl::OkStatus();
}

// The tenant's items are held against a clock that moves on by item_ns with each of them, and is
// never behind the real one; ahead of it by kBurstNs at most.
absl::Status Admission::CountRate(Request* request, int32_t places) {
  TenantQueues::Tenant& tenant = TenantOf(*request);
  const int64_t item_ns = tenant.item_ns.load(std::memory_order_relaxed);
  if (item_ns == 0) return absl::OkStatus();
  const int64_t now_ns = request->arrived * 1000;
  int64_t before = tenant.rate_ns.load(std::memory_order_relaxed);
  int64_t begin = 0;
  do {
    begin = std::max(before, now_ns);
    if (begin - now_ns > kBurstNs) {
      refused_total_.fetch_add(1, std::memory_order_relaxed);
      tenant.refused_total.fetch_add(1, std::memory_order_relaxed);
      request->retry_after_ms = static_cast<int32_t>(
          std::clamp<int64_t>((begin - now_ns - kBurstNs) / 1'000'000 + 1, 1, kRetryMsMax));
      return absl::ResourceExhaustedError(absl::StrCat(
          "items come faster than the ", kSecondNs / item_ns,
          " a second that your tenant may send; try again in ", request->retry_after_ms, " ms"));
    }
  } while (!tenant.rate_ns.compare_exchange_weak(before, begin + places * item_ns,
                                                 std::memory_order_relaxed));
  return absl::OkStatus();
}

absl::Status Admission::Offer(Request* request) {
  const int32_t places = PlacesOf(*request);
  if (is_refusing()) return Refusal(request);
  if (absl::Status status = TakePlaces(request, places); !status.ok()) return status;
  if (absl::Status status = CountRate(request, places); !status.ok()) {
    GiveBack(*request, places);
    return status;
  }
  request->book = Request::Book{};
  request->book.places = places;
  Request* newest = newest_.load(std::memory_order_relaxed);
  do {
    if (newest == ClosedMark()) {
      GiveBack(*request, places);
      return Refusal(request);
    }
    request->book.next = newest;
  } while (!newest_.compare_exchange_weak(newest, request, std::memory_order_seq_cst,
                                          std::memory_order_relaxed));
  return absl::OkStatus();
}

Request* Admission::InOrder(Request* newest) {
  Request* oldest = nullptr;
  while (newest != nullptr) {
    Request* const next = newest->book.next;
    newest->book.next = oldest;
    oldest = newest;
    newest = next;
  }
  return oldest;
}

Request* Admission::TakeAll() {
  if (!HasOffers()) return nullptr;
  return InOrder(newest_.exchange(nullptr, std::memory_order_acquire));
}

bool Admission::HasOffers() const {
  Request* const newest = newest_.load(std::memory_order_seq_cst);
  return newest != nullptr && newest != ClosedMark();
}

void Admission::Refuse(bool is_device_failed) {
  // A failure outranks a drain; neither ends.
  State expected = State::kOpen;
  if (is_device_failed) {
    state_.store(State::kFailed);
  } else {
    state_.compare_exchange_strong(expected, State::kDraining);
  }
}

Request* Admission::Close() {
  Request* const newest = newest_.exchange(ClosedMark(), std::memory_order_acquire);
  return newest == ClosedMark() ? nullptr : InOrder(newest);
}

}  // namespace fp8kvd::engine
