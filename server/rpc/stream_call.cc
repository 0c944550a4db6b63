#include "server/rpc/stream_call.h"

#include <utility>

#include "server/rpc/services.h"
#include "server/translate/replies.h"
#include "server/translate/status.h"

namespace fp8kvd::rpc {

StreamCall::StreamCall(MethodSlot* slot)
    : Call(slot), on_read_(this, &StreamCall::OnRead), on_written_(this, &StreamCall::OnWritten) {}

void StreamCall::Request(Event* arrived) {
  stream_.emplace(&context());
  slot().service->RequestBidi(slot(), &context(), &*stream_, arrived);
}

void StreamCall::OnArrived() {
  ReadMore();
  FinishIfOver();  // the server may be draining
}

void StreamCall::OnCancelled() {
  broken_ = true;
  has_message_ = false;
  for (const std::unique_ptr<Flight>& flight : flights_) {
    if (flight->waiting) flight->job->Cancel();
  }
  FinishIfOver();
}

void StreamCall::OnDrain() { FinishIfOver(); }

void StreamCall::ReadMore() {
  const bool has_room =
      idle_.size() > 0 || flights_.size() < static_cast<size_t>(parts().stream_inflight_max);
  const bool has_bytes = bytes_held_ < kStreamBytesMax;
  if (reading_ || has_message_ || read_all_ || broken_ || finishing() || !has_room || !has_bytes)
    return;
  reading_ = true;
  stream_->Read(&message_, &on_read_);
}

StreamCall::Flight* StreamCall::TakeFlight() {
  if (idle_.empty()) {
    flights_.push_back(std::make_unique<Flight>());
    WorkOwner* const owner = this;
    flights_.back()->job = std::make_unique<DecodeJob>(&parts(), slot().poller, owner);
    return flights_.back().get();
  }
  Flight* const flight = idle_.back();
  idle_.pop_back();
  return flight;
}

void StreamCall::OnRead(bool ok) {
  reading_ = false;
  if (ok && !finishing()) {
    has_message_ = !broken_;
    TakeMessage();
  } else {
    read_all_ = true;
  }
  ReadMore();
  FinishIfOver();
  RetireIfOver();
}

void StreamCall::TakeMessage() {
  if (has_message_ && loading_ == nullptr) {
    has_message_ = false;
    BeginMessage();
  }
}

void StreamCall::BeginMessage() {
  Flight* const flight = TakeFlight();
  flight->bytes = static_cast<int64_t>(message_.Length());
  bytes_held_ += flight->bytes;
  slot().metrics->Received(static_cast<uint64_t>(flight->bytes));
  if (flight->job->Begin(&message_, ArrivalNow()) == Job::Next::kLater) {
    flight->waiting = true;
    if (flight->job->is_loading()) loading_ = flight->job.get();
  } else {
    QueueReply(flight);
  }
}

void StreamCall::OnGoesOn(Work* work) {
  if (work != loading_) return;
  loading_ = nullptr;
  TakeMessage();
  ReadMore();
}

void StreamCall::OnWork(Work* work) {
  if (work == loading_) loading_ = nullptr;
  for (const std::unique_ptr<Flight>& flight : flights_) {
    if (flight->job.get() != work) continue;
    flight->waiting = false;
    QueueReply(flight.get());
    break;
  }
  TakeMessage();
  ReadMore();
  FinishIfOver();
  RetireIfOver();
}

void StreamCall::QueueReply(Flight* flight) {
  grpc::ByteBuffer reply;
  const absl::Status status = flight->job->Answer(&reply);
  if (!status.ok()) {
    reply = translate::DecodeErrorReply(flight->job->request_id(), status,
                                        flight->job->retry_after_ms());
  }
  bytes_held_ -= flight->bytes;
  flight->bytes = static_cast<int64_t>(reply.Length());
  bytes_held_ += flight->bytes;
  replies_.push_back({reply, flight});
  WriteMore();
}

void StreamCall::WriteMore() {
  if (writing_ || replies_.empty() || finishing()) return;
  if (broken_) {
    for (const Queued& reply : replies_) {
      bytes_held_ -= reply.flight->bytes;
      idle_.push_back(reply.flight);
    }
    replies_.clear();
    return;
  }
  writing_ = true;
  slot().metrics->Sent(static_cast<uint64_t>(replies_.front().flight->bytes));
  stream_->Write(replies_.front().bytes, &on_written_);
}

void StreamCall::OnWritten(bool ok) {
  writing_ = false;
  TookReply();
  Flight* const flight = replies_.front().flight;
  replies_.pop_front();
  bytes_held_ -= flight->bytes;
  idle_.push_back(flight);
  if (!ok) broken_ = true;
  WriteMore();
  ReadMore();
  FinishIfOver();
  RetireIfOver();
}

void StreamCall::FinishIfOver() {
  const bool is_idle = idle_.size() == flights_.size() && !writing_ && !has_message_;
  const bool is_over = read_all_ || broken_ || parts().draining;
  if (finishing() || !is_idle || !is_over) return;
  if (read_all_ && !broken_) {
    stream_->Finish(grpc::Status::OK, Finishing(grpc::Status::OK, 0));
  } else if (broken_) {
    FinishWith(absl::CancelledError("the stream broke; open another"), 0);
  } else {
    FinishWith(absl::UnavailableError("the server drains; connect again, then see your handles"),
               0);
  }
}

void StreamCall::FinishWith(const absl::Status& status, int32_t retry_after_ms) {
  const grpc::Status grpc_status = translate::ToGrpc(status, retry_after_ms);
  stream_->Finish(grpc_status, Finishing(grpc_status, retry_after_ms));
}

void StreamCall::Reset() {
  message_.Clear();
  read_all_ = broken_ = false;
}

}  // namespace fp8kvd::rpc
