#include "server/rpc/health.h"

#include "server/rpc/control_job.h"
#include "server/rpc/services.h"
#include "server/translate/status.h"

namespace fp8kvd::rpc {
namespace {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

HealthCheckResponse StateOf(const Parts& parts, const HealthCheckRequest& request) {
  HealthCheckResponse response;
  if (!request.service().empty() && request.service() != Services::kName) {
    response.set_status(HealthCheckResponse::SERVICE_UNKNOWN);
  } else {
    response.set_status(parts.draining ? HealthCheckResponse::NOT_SERVING
                                       : HealthCheckResponse::SERVING);
  }
  return response;
}

}  // namespace

Job::Next HealthJob::Begin(grpc::ByteBuffer* bytes, const Arrival&) {
  HealthCheckRequest request;
  status_ = ParseBounded(bytes, kControlBytesMax, &request);
  if (!status_.ok()) return Next::kAnswer;
  response_ = StateOf(parts(), request);
  if (response_.status() == HealthCheckResponse::SERVICE_UNKNOWN) {
    status_ = absl::NotFoundError(
        absl::StrCat("the service is unknown here; ask for \"\" (the whole server) or \"",
                     Services::kName, "\""));
  }
  return Next::kAnswer;
}

absl::Status HealthJob::Answer(grpc::ByteBuffer* reply) {
  if (status_.ok()) *reply = translate::Serialize(response_);
  return status_;
}

WatchCall::WatchCall(MethodSlot* slot) : Call(slot), on_written_(this, &WatchCall::OnWritten) {}

void WatchCall::Request(Event* arrived) {
  writer_.emplace(&context());
  slot().service->RequestServerStream(slot(), &context(), &message_, &*writer_, arrived);
}

void WatchCall::OnArrived() {
  const absl::Status status = ParseBounded(&message_, kControlBytesMax, &request_);
  if (status.ok()) {
    Write();
  } else {
    FinishWith(status, 0);
  }
}

void WatchCall::Write() {
  const HealthCheckResponse response = StateOf(parts(), request_);
  written_ = response.SerializeAsString();
  reply_ = translate::Serialize(response);
  writing_ = true;
  writer_->Write(reply_, &on_written_);
}

void WatchCall::OnWritten(bool ok) {
  writing_ = false;
  TookReply();
  if (!ok) broken_ = true;
  if (broken_) {
    if (!finishing()) FinishWith(absl::CancelledError("the stream broke; open another"), 0);
  } else if (parts().draining) {
    OnDrain();
  }
  RetireIfOver();
}

void WatchCall::OnCancelled() {
  broken_ = true;
  if (!writing_ && !finishing()) FinishWith(absl::CancelledError("the client went"), 0);
}

void WatchCall::OnDrain() {
  if (writing_ || finishing()) return;
  if (StateOf(parts(), request_).SerializeAsString() != written_) {
    Write();
  } else {
    FinishWith(absl::UnavailableError("the server drains; watch again after it restarted"), 0);
  }
}

void WatchCall::FinishWith(const absl::Status& status, int32_t retry_after_ms) {
  const grpc::Status grpc_status = translate::ToGrpc(status, retry_after_ms);
  writer_->Finish(grpc_status, Finishing(grpc_status, retry_after_ms));
}

void WatchCall::Reset() {
  request_.Clear();
  written_.clear();
  broken_ = false;
  message_.Clear();
  reply_.Clear();
}

}  // namespace fp8kvd::rpc
