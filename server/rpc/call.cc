#include "server/rpc/call.h"

#include <algorithm>
#include <iterator>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "server/rpc/tokens.h"
#include "server/translate/status.h"

namespace fp8kvd::rpc {
namespace {

constexpr char kBearer[] = "Bearer ";
constexpr int32_t kBusyRetryMs = 100;  // calls come and go at that pace
// Calls of anyone are counted by themselves: a server full of streams is healthy, and whoever asks
// is told so; and who has no token takes nothing from those who have.
constexpr int64_t kCallsOfAnyoneMin = 64;

int64_t CallsOfAnyoneMax(int64_t calls_max) { return std::max(kCallsOfAnyoneMin, calls_max / 4); }

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
  finishing_ = finished_ = ended_ = cancelled_ = is_tenants_ = false;
  tenant_ = cache::TenantId{0};
  sweeps_stalled_ = 0;
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
  absl::Status status = Identify();
  if (absl::Status room = Admit(); status.ok()) status = room;
  if (status.ok()) {
    OnArrived();
  } else {
    FinishWith(status, absl::IsResourceExhausted(status) ? kBusyRetryMs : 0);
  }
}

absl::Status Call::Identify() {
  if (slot_->access == Access::kAnyone || parts().tokens == nullptr) return absl::OkStatus();
  const auto [begin, end] = context_->client_metadata().equal_range("authorization");
  std::optional<cache::TenantId> tenant;
  if (begin != end && std::next(begin) == end) {
    absl::string_view value(begin->second.data(), begin->second.size());
    if (absl::StartsWithIgnoreCase(value, kBearer)) {
      tenant = parts().tokens->TenantOf(value.substr(sizeof(kBearer) - 1));
    }
  }
  // One text for all that can be wrong with it.
  if (!tenant.has_value()) {
    return absl::UnauthenticatedError(
        "the call has no token that this server knows; send one as metadata \"authorization: "
        "Bearer "
        "TOKEN\", and ask whoever runs the server for it");
  }
  tenant_ = *tenant;
  is_tenants_ = true;
  return absl::OkStatus();
}

// Counted among anyone's first here, and last where it ends: it is hardly ever taken for another.
absl::Status Call::AdmitAnyone() {
  const int64_t open = slot_->parts->calls_of_anyone_open.fetch_add(1) + 1;
  slot_->parts->calls_open.fetch_add(1);
  const int64_t max = CallsOfAnyoneMax(parts().calls_max);
  if (open <= max) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      open, " calls without a tenant are open, this server takes ", max, "; watch less, or later"));
}

absl::Status Call::Admit() {
  if (slot_->access == Access::kAnyone) return AdmitAnyone();
  const int64_t all = slot_->parts->calls_open.fetch_add(1) + 1;
  const int64_t open = all - slot_->parts->calls_of_anyone_open.load();
  int64_t mine = 0;
  if (is_tenants_) {
    mine = slot_->parts->tenant_calls_open[static_cast<uint32_t>(tenant_)].fetch_add(
               1, std::memory_order_relaxed) +
           1;
  }
  if (open > parts().calls_max) {
    return absl::ResourceExhaustedError(
        absl::StrCat(open, " calls and streams are open, this server takes ", parts().calls_max,
                     "; use fewer streams, or try again"));
  }
  if (mine <= parts().calls_per_tenant_max) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(mine, " calls and streams of yours are open, this server takes ",
                   parts().calls_per_tenant_max, " of a tenant; use fewer streams, or try again"));
}

void Call::Ended(bool) {
  ended_ = true;
  cancelled_ = context_->IsCancelled();
  if (cancelled_ && !finished_) OnCancelled();
  RetireIfOver();
}

Event* Call::Finishing(const grpc::Status& status, int32_t retry_after_ms) {
  finishing_ = true;
  sweeps_stalled_ = 0;
  if (retry_after_ms > 0) {
    context_->AddTrailingMetadata(translate::kPushbackTrailer, absl::StrCat(retry_after_ms));
  }
  slot_->metrics->Observe(status.error_code(), parts().clock->NowUs() - arrived_);
  return &on_finished_;
}

void Call::Sweep() {
  const bool is_writing = IsWriting() || (finishing_ && !finished_);
  sweeps_stalled_ = is_writing ? sweeps_stalled_ + 1 : 0;
  if (sweeps_stalled_ > kSweeps) context_->TryCancel();
}

void Call::Finished(bool) {
  finished_ = true;
  RetireIfOver();
}

void Call::RetireIfOver() {
  if (!finished_ || !ended_ || IsBusy()) return;
  slot_->open.erase(this);
  slot_->parts->calls_open.fetch_sub(1);
  if (slot_->access == Access::kAnyone) slot_->parts->calls_of_anyone_open.fetch_sub(1);
  if (is_tenants_) {
    slot_->parts->tenant_calls_open[static_cast<uint32_t>(tenant_)].fetch_sub(
        1, std::memory_order_relaxed);
  }
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
