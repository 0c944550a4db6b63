// server/rpc/reflection_call.h: gRPC's reflection protocol, so that grpcurl and the like need no
// .proto: services, and the files of what they name. One question at a time per stream.
#pragma once

#include <optional>

#include "grpc/reflection/v1alpha/reflection.pb.h"
#include "grpcpp/support/async_stream.h"

#include "server/rpc/call.h"

namespace fp8kvd::rpc {

inline constexpr char kReflectionName[] = "grpc.reflection.v1alpha.ServerReflection";

// The answer to one question, from what is linked into the daemon.
grpc::reflection::v1alpha::ServerReflectionResponse Reflect(
    const grpc::reflection::v1alpha::ServerReflectionRequest& request);

class ReflectionCall final : public Call {
 public:
  explicit ReflectionCall(MethodSlot* slot);

 private:
  void Request(Event* arrived) override;
  void OnArrived() override {
    if (parts().draining) {
      OnDrain();
    } else {
      Read();
    }
  }
  void OnCancelled() override { broken_ = true; }  // what is under way fails, and then we finish
  void OnDrain() override;
  void FinishWith(const absl::Status& status, int32_t retry_after_ms) override;
  void Reset() override;
  bool IsBusy() const override { return reading_ || writing_; }
  bool IsWriting() const override { return writing_; }
  Call* Another() const override { return new ReflectionCall(&slot()); }

  void Read();
  void OnRead(bool ok);
  void OnWritten(bool ok);

  bool reading_ = false;
  bool writing_ = false;
  bool broken_ = false;
  grpc::ByteBuffer message_;
  grpc::ByteBuffer reply_;
  std::optional<grpc::ServerAsyncReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>> stream_;
  MemberEvent<ReflectionCall> on_read_;
  MemberEvent<ReflectionCall> on_written_;
};

}  // namespace fp8kvd::rpc
