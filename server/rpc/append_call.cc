#include "server/rpc/append_call.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "server/rpc/services.h"
#include "server/translate/control.h"
#include "server/translate/replies.h"
#include "server/translate/status.h"

namespace fp8kvd::rpc {
namespace {

constexpr int32_t kSlotWaitMs = 2;  // about a slice of another stream

gpr_timespec In(int32_t ms) {
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(ms, GPR_TIMESPAN));
}

}  // namespace

AppendCall::AppendCall(MethodSlot* slot)
    : Call(slot),
      works_{AppendWork(slot->parts, slot->poller, this),
             AppendWork(slot->parts, slot->poller, this)},
      on_read_(this, &AppendCall::OnRead),
      on_slot_alarm_(this, &AppendCall::OnSlotAlarm),
      on_last_reads_alarm_(this, &AppendCall::OnLastReadsAlarm) {}

void AppendCall::Request(Event* arrived) {
  reader_.emplace(&context());
  slot().service->RequestClientStream(slot(), &context(), &*reader_, arrived);
}

void AppendCall::OnArrived() {
  if (parts().draining) {
    OnDrain();
  } else {
    ReadMore();
  }
}

void AppendCall::OnCancelled() {
  if (running_ != nullptr) running_->Cancel();
  if (waiting_for_slot_) slot_alarm_.Cancel();
  Fail(absl::CancelledError("the client ended the stream, or its deadline passed"), 0);
}

void AppendCall::OnDrain() {
  Fail(absl::UnavailableError("the server drains; connect again, then resend from the committed "
                              "lengths"),
       0);
}

void AppendCall::ReadMore() {
  if (reading_ || has_message_ || read_all_ || !failure_.ok()) return;
  reading_ = true;
  reader_->Read(&message_, &on_read_);
}

void AppendCall::OnRead(bool ok) {
  reading_ = false;
  if (!ok) read_all_ = true;
  if (ok) slot().metrics->Received(message_.Length());
  if (ok && failure_.ok()) {
    has_message_ = true;
    PrepareChunk();
  }
  FinishIfOver();
  RetireIfOver();
}

void AppendCall::OnSlotAlarm(bool) {
  waiting_for_slot_ = false;
  PrepareChunk();
  FinishIfOver();
  RetireIfOver();
}

void AppendCall::PrepareChunk() {
  const bool has_turn = loading_ == nullptr && ready_ == nullptr;
  if (!has_message_ || waiting_for_slot_ || !has_turn || !failure_.ok()) return;
  AppendWork* const work = running_ == &works_[0] ? &works_[1] : &works_[0];
  const absl::Status status = work->Prepare(&message_, tenant());
  if (absl::IsResourceExhausted(status)) {
    waiting_for_slot_ = true;
    slot_alarm_.Set(slot().poller->queue(), In(kSlotWaitMs), static_cast<Event*>(&on_slot_alarm_));
    return;
  }
  has_message_ = false;
  if (!status.ok() || !work->is_large()) {
    loading_ = work;
    OnLoaded(status);
    return;
  }
  if (running_ == nullptr) {
    running_ = work;
    const Arrival arrival = ArrivalNow();
    work->Load(&arrival);
  } else {
    loading_ = work;
    work->Load(nullptr);
  }
  ReadMore();
}

void AppendCall::OnLoaded(const absl::Status& status) {
  AppendWork* const work = std::exchange(loading_, nullptr);
  if (!status.ok()) {
    Fail(status, 0);
    return;
  }
  if (!failure_.ok()) {
    work->Drop();
    return;
  }
  ready_ = work;
  if (running_ == nullptr) RunNext();
  ReadMore();
}

void AppendCall::RunNext() {
  running_ = std::exchange(ready_, nullptr);
  const absl::Status status = running_->Run(ArrivalNow());
  if (status.ok()) return;
  const int32_t retry_after_ms = running_->retry_after_ms();
  running_ = nullptr;
  Fail(status, retry_after_ms);
}

void AppendCall::OnWork(Work* work) {
  if (work == loading_) {
    OnLoaded(loading_->FinishLoading());
  } else {
    OnRan(running_->Finish());
  }
  PrepareChunk();
  ReadMore();
  FinishIfOver();
}

void AppendCall::OnRan(const absl::Status& status) {
  AppendWork* const work = std::exchange(running_, nullptr);
  if (status.ok()) {
    Note(work->request());
  } else {
    Fail(status, work->retry_after_ms());
  }
  if (failure_.ok() && ready_ != nullptr) RunNext();
}

void AppendCall::Note(const engine::AppendRequest& request) {
  for (int32_t i = 0; i < request.layers_count; ++i) {
    const Place place{request.handle, request.layer + i};
    const auto [it, is_new] = places_.try_emplace(place, response_.committed_size());
    if (is_new && places_.size() > kPlacesMax) {
      Fail(absl::InvalidArgumentError(
               absl::StrCat("the stream names more than ", kPlacesMax,
                            " (sequence, layer) pairs; end it and open another for the rest")),
           0);
      return;
    }
    v1::CommittedLength* const committed =
        is_new ? response_.add_committed() : response_.mutable_committed(it->second);
    if (is_new) {
      *committed->mutable_handle() = translate::FromHandle(place.handle);
      committed->set_layer(static_cast<uint32_t>(place.layer));
    }
    committed->set_seq_len(static_cast<uint64_t>(request.seq_lens[i]));
  }
}

void AppendCall::Fail(const absl::Status& status, int32_t retry_after_ms) {
  if (failure_.ok()) {
    failure_ = status;
    failure_retry_after_ms_ = retry_after_ms;
  }
  if (ready_ != nullptr) std::exchange(ready_, nullptr)->Drop();
  has_message_ = false;
  FinishIfOver();
}

void AppendCall::OnLastReadsAlarm(bool) {
  has_last_reads_ = false;
  are_last_reads_over_ = true;
  FinishIfOver();
  RetireIfOver();
}

// After a failure: whether the client's rest is still awaited.
bool AppendCall::ReadsOn() {
  if (read_all_ || are_last_reads_over_ || cancelled() || parts().draining) return false;
  if (!has_last_reads_) {
    has_last_reads_ = true;
    last_reads_alarm_.Set(slot().poller->queue(), In(kLastReadsMs),
                          static_cast<Event*>(&on_last_reads_alarm_));
  }
  if (!reading_) {
    reading_ = true;
    reader_->Read(&message_, &on_read_);
  }
  return true;
}

void AppendCall::FinishIfOver() {
  if (finishing() || loading_ != nullptr || running_ != nullptr || waiting_for_slot_) return;
  if (!failure_.ok()) {
    if (ReadsOn()) return;
    if (has_last_reads_) last_reads_alarm_.Cancel();
    FinishWith(failure_, failure_retry_after_ms_);
    return;
  }
  if (!read_all_ || has_message_ || ready_ != nullptr) return;
  reply_ = translate::Serialize(response_);
  slot().metrics->Sent(reply_.Length());
  reader_->Finish(reply_, grpc::Status::OK, Finishing(grpc::Status::OK, 0));
}

void AppendCall::FinishWith(const absl::Status& status, int32_t retry_after_ms) {
  const grpc::Status grpc_status = translate::ToGrpc(status, retry_after_ms);
  reader_->FinishWithError(grpc_status, Finishing(grpc_status, retry_after_ms));
}

void AppendCall::Reset() {
  read_all_ = false;
  are_last_reads_over_ = false;
  failure_ = absl::OkStatus();
  failure_retry_after_ms_ = 0;
  message_.Clear();
  reply_.Clear();
  response_.Clear();
  places_.clear();
}

}  // namespace fp8kvd::rpc
