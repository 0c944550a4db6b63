#include "server/engine/admission.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace fp8kvd::engine {
namespace {

// Advice to wait longer than this would outlive the burst that caused it.
constexpr int64_t kRetryMsMax = 10'000;

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

absl::Status Admission::Refusal(Request* request) {
  refused_total_.fetch_add(1, std::memory_order_relaxed);
  switch (state_.load()) {
    case State::kDraining:
      return absl::UnavailableError("the server drains and takes no new work; use another one");
    case State::kFailed:
      return DeviceFailedError();
    case State::kOpen:
      break;
  }
  const int64_t queue_us = places_used() * item_us_.load(std::memory_order_relaxed);
  request->retry_after_ms =
      static_cast<int32_t>(std::clamp<int64_t>(queue_us / 1000, 1, kRetryMsMax));
  return absl::ResourceExhaustedError(
      absl::StrCat(PlacesOf(*request), " items were sent while ", places_used(),
                   " wait or run, and the queue holds ", places_max_, "; try again in ",
                   request->retry_after_ms, " ms"));
}

absl::Status Admission::Offer(Request* request) {
  const int32_t places = PlacesOf(*request);
  if (is_refusing()) return Refusal(request);
  if (places_used_.fetch_add(places, std::memory_order_relaxed) + places > places_max_) {
    GiveBack(places);
    return Refusal(request);
  }
  request->book = Request::Book{};
  request->book.places = places;
  Request* newest = newest_.load(std::memory_order_relaxed);
  do {
    if (newest == ClosedMark()) {
      GiveBack(places);
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
