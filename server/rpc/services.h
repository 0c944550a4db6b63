// server/rpc/services.h: the services as gRPC sees them: every method takes and gives raw bytes,
// and the call objects that serve it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "grpcpp/impl/service_type.h"
#include "grpcpp/support/async_stream.h"
#include "grpcpp/support/async_unary_call.h"

#include "server/ops/metrics.h"
#include "server/rpc/call.h"

namespace fp8kvd::rpc {

// A service whose methods are asked for by number, in bytes.
class RawService {
 public:
  virtual ~RawService() = default;
  virtual grpc::Service* grpc_service() = 0;

  virtual void RequestUnary(const MethodSlot& slot, grpc::ServerContext* context,
                            grpc::ByteBuffer* message,
                            grpc::ServerAsyncResponseWriter<grpc::ByteBuffer>* writer,
                            Event* arrived) = 0;
  virtual void RequestClientStream(
      const MethodSlot& slot, grpc::ServerContext* context,
      grpc::ServerAsyncReader<grpc::ByteBuffer, grpc::ByteBuffer>* reader, Event* arrived) = 0;
  virtual void RequestServerStream(const MethodSlot& slot, grpc::ServerContext* context,
                                   grpc::ByteBuffer* message,
                                   grpc::ServerAsyncWriter<grpc::ByteBuffer>* writer,
                                   Event* arrived) = 0;
  virtual void RequestBidi(
      const MethodSlot& slot, grpc::ServerContext* context,
      grpc::ServerAsyncReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>* stream,
      Event* arrived) = 0;
};

// All services of the daemon.
class Services {
 public:
  static constexpr char kName[] = "fp8kvd.v1.DecodeAttention";

  explicit Services(ops::Metrics* metrics);

  std::vector<grpc::Service*> grpc_services();

  // Makes every method listen on this poller. The slots live as long as the Services.
  void Listen(Parts* parts, Poller* poller);
  // On this poller's thread: tells every open call that the server drains.
  void Drain(const Poller* poller);
  // The same: sweeps every open call (call.h).
  void Sweep(const Poller* poller);

 private:
  struct Method {
    RawService* service;
    int index;
    std::string name;
    ops::MethodMetrics* metrics;
    Access access;
    // Makes a call object that listens in the slot.
    Call* (*make_call)(MethodSlot* slot);
  };
  void AddMethods(RawService* service, const char* service_name, ops::Metrics* metrics);

  std::vector<std::unique_ptr<RawService>> services_;
  std::vector<Method> methods_;
  std::vector<std::unique_ptr<MethodSlot>> slots_;
};

}  // namespace fp8kvd::rpc
