#include "server/rpc/call.h"

#include "absl/strings/str_cat.h"

#include "server/translate/status.h"

namespace fp8kvd::rpc {
namespace {

constexpr int32_t kBusyRetryMs = 100;  // calls come and go at that pace

// The time left is counted in gRPC's own type: as chrono's nanoseconds, a client's deadline of some
// centuries overflows.
engine::TimeUs ToDeadline(engine::TimeUs now, gpr_timespec deadline) {
  constexpr int64_t kYearS = int64_t{366} * 24 * 3600;
  const gpr_timespec left = gpr_time_sub(deadline, gpr_now(deadline.clock_type));
  if (left.tv_sec >= kYearS) return engine::kNoDeadline;
  if (left.tv_sec < 0) return now;
  return now + left.tv_sec * 1000000 + left.tv_nsec / 1000;
}

}  // namespace

Call::Call(MethodSlot* slot)
    : slot_(slot),
      on_arrived_(this, &Call::Arrived),
      on_ended_(this, &Call::Ended),
      on_finished_(this, &Call::Finished) {}

void Call::Listen() {
  context_.emplace();
  finishing_ = finished_ = ended_ = cancelled_ = false;
  context_->AsyncNotifyWhenDone(&on_ended_);
  ++slot_->listening;
  Request(&on_arrived_);
}

void Call::Arrived(bool ok) {
  --slot_->listening;
  if (!ok) {  // the server shuts down; no other event of this object is under way
    delete this;
    return;
  }
  if (slot_->listening == 0 && !parts().stopping) Another()->Listen();
  arrived_ = parts().clock->NowUs();
  slot_->open.insert(this);
  const int64_t open = slot_->parts->calls_open.fetch_add(1, std::memory_order_relaxed) + 1;
  if (open > parts().calls_max) {
    FinishWith(absl::ResourceExhaustedError(
                   absl::StrCat(open, " calls and streams are open, this server takes ",
                                parts().calls_max, "; use fewer streams, or try again")),
               kBusyRetryMs);
    return;
  }
  OnArrived();
}

void Call::Ended(bool) {
  ended_ = true;
  cancelled_ = context_->IsCancelled();
  if (cancelled_ && !finished_) OnCancelled();
  RetireIfOver();
}

Event* Call::Finishing(const grpc::Status& status, int32_t retry_after_ms) {
  finishing_ = true;
  if (retry_after_ms > 0) {
    context_->AddTrailingMetadata(translate::kPushbackTrailer, absl::StrCat(retry_after_ms));
  }
  slot_->metrics->Observe(status.error_code(), parts().clock->NowUs() - arrived_);
  return &on_finished_;
}

void Call::Finished(bool) {
  finished_ = true;
  RetireIfOver();
}

void Call::RetireIfOver() {
  if (!finished_ || !ended_ || IsBusy()) return;
  slot_->open.erase(this);
  slot_->parts->calls_open.fetch_sub(1, std::memory_order_relaxed);
  if (parts().stopping || slot_->listening >= MethodSlot::kListeningMax) {
    delete this;
    return;
  }
  Reset();
  Listen();
}

Arrival Call::ArrivalNow() const {
  const engine::TimeUs now = parts().clock->NowUs();
  return {.tenant = tenant_, .arrived = now, .deadline = ToDeadline(now, context_->raw_deadline())};
}

}  // namespace fp8kvd::rpc
