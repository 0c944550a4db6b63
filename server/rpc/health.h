// server/rpc/health.h: gRPC's health protocol, for "" and for our service. SERVING from the first
// call until the drain begins.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "grpc/health/v1/health.pb.h"
#include "grpcpp/support/async_stream.h"

#include "server/rpc/call.h"

namespace fp8kvd::rpc {

inline constexpr char kHealthName[] = "grpc.health.v1.Health";

// Check.
class HealthJob final : public Job {
 public:
  using Job::Job;
  Next Begin(grpc::ByteBuffer* bytes, const Arrival& arrival) override;
  absl::Status Answer(grpc::ByteBuffer* reply) override;

 private:
  absl::Status status_;
  grpc::health::v1::HealthCheckResponse response_;
};

// Watch: the state, once more when it changes; then the drain ends the call.
class WatchCall final : public Call {
 public:
  explicit WatchCall(MethodSlot* slot);

 private:
  void Request(Event* arrived) override;
  void OnArrived() override;
  void OnCancelled() override;
  void OnDrain() override;
  void FinishWith(const absl::Status& status, int32_t retry_after_ms) override;
  void Reset() override;
  bool IsBusy() const override { return writing_; }
  bool IsWriting() const override { return writing_; }
  Call* Another() const override { return new WatchCall(&slot()); }

  void OnWritten(bool ok);
  void Write();

  grpc::health::v1::HealthCheckRequest request_;
  std::string written_;  // the last state, as bytes
  bool writing_ = false;
  bool broken_ = false;
  grpc::ByteBuffer message_;
  grpc::ByteBuffer reply_;
  std::optional<grpc::ServerAsyncWriter<grpc::ByteBuffer>> writer_;
  MemberEvent<WatchCall> on_written_;
};

}  // namespace fp8kvd::rpc
