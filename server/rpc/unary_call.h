// server/rpc/unary_call.h: a call of one message and one reply.
#pragma once

#include <memory>
#include <optional>

#include "grpcpp/support/async_unary_call.h"

#include "server/rpc/call.h"

namespace fp8kvd::rpc {

using MakeJob = std::unique_ptr<Job> (*)(const Parts* parts, Poller* poller, WorkOwner* owner);

class UnaryCall final : public Call, private WorkOwner {
 public:
  UnaryCall(MethodSlot* slot, MakeJob make_job);

 private:
  void Request(Event* arrived) override;
  void OnArrived() override;
  void OnCancelled() override;
  void OnWork(Work* work) override;
  void FinishWith(const absl::Status& status, int32_t retry_after_ms) override;
  void Reset() override;
  bool IsBusy() const override { return waiting_; }
  Call* Another() const override { return new UnaryCall(&slot(), make_job_); }

  void Reply();

  const MakeJob make_job_;
  const std::unique_ptr<Job> job_;
  bool waiting_ = false;  // for OnWork
  grpc::ByteBuffer message_;
  grpc::ByteBuffer reply_;
  std::optional<grpc::ServerAsyncResponseWriter<grpc::ByteBuffer>> writer_;
};

}  // namespace fp8kvd::rpc
