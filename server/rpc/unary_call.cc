#include "server/rpc/unary_call.h"

#include "server/rpc/services.h"
#include "server/translate/status.h"

namespace fp8kvd::rpc {

UnaryCall::UnaryCall(MethodSlot* slot, MakeJob make_job)
    : Call(slot), make_job_(make_job), job_(make_job(slot->parts, slot->poller, this)) {}

void UnaryCall::Request(Event* arrived) {
  writer_.emplace(&context());
  slot().service->RequestUnary(slot(), &context(), &message_, &*writer_, arrived);
}

void UnaryCall::OnArrived() {
  slot().metrics->Received(message_.Length());
  if (job_->Begin(&message_, ArrivalNow()) == Job::Next::kAnswer) {
    Reply();
  } else {
    waiting_ = true;
  }
}

void UnaryCall::OnCancelled() {
  if (waiting_) job_->Cancel();
}

void UnaryCall::OnWork(Work*) {
  waiting_ = false;
  Reply();
}

void UnaryCall::Reply() {
  const absl::Status status = job_->Answer(&reply_);
  if (!status.ok()) {
    FinishWith(status, job_->retry_after_ms());
    return;
  }
  slot().metrics->Sent(reply_.Length());
  Event* const finished = Finishing(grpc::Status::OK, /*retry_after_ms=*/0);
  writer_->Finish(reply_, grpc::Status::OK, finished);
}

void UnaryCall::FinishWith(const absl::Status& status, int32_t retry_after_ms) {
  const grpc::Status grpc_status = translate::ToGrpc(status, retry_after_ms);
  Event* const finished = Finishing(grpc_status, retry_after_ms);
  writer_->FinishWithError(grpc_status, finished);
}

void UnaryCall::Reset() {
  message_.Clear();
  reply_.Clear();
}

}  // namespace fp8kvd::rpc
