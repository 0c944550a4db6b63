#include "server/rpc/services.h"

#include "google/protobuf/descriptor.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"

#include "config/base/check.h"
#include "fp8kvd/v1/kv.grpc.pb.h"
#include "server/rpc/append_call.h"
#include "server/rpc/control_job.h"
#include "server/rpc/health.h"
#include "server/rpc/helper_jobs.h"
#include "server/rpc/info_job.h"
#include "server/rpc/measure_job.h"
#include "server/rpc/reflection_call.h"
#include "server/rpc/shared_memory_job.h"
#include "server/rpc/stream_call.h"
#include "server/rpc/unary_call.h"

namespace fp8kvd::rpc {
namespace {

// `Generated` is protoc's service class; all its methods are marked raw.
template <typename Generated>
class RawServiceOf final : public RawService, private Generated {
 public:
  explicit RawServiceOf(int methods) {
    for (int i = 0; i < methods; ++i) this->MarkMethodRaw(i);
  }
  grpc::Service* grpc_service() override { return this; }

  void RequestUnary(const MethodSlot& slot, grpc::ServerContext* context, grpc::ByteBuffer* message,
                    grpc::ServerAsyncResponseWriter<grpc::ByteBuffer>* writer,
                    Event* arrived) override {
    grpc::ServerCompletionQueue* const queue = slot.poller->queue();
    this->RequestAsyncUnary(slot.index, context, message, writer, queue, queue, arrived);
  }
  void RequestClientStream(const MethodSlot& slot, grpc::ServerContext* context,
                           grpc::ServerAsyncReader<grpc::ByteBuffer, grpc::ByteBuffer>* reader,
                           Event* arrived) override {
    grpc::ServerCompletionQueue* const queue = slot.poller->queue();
    this->RequestAsyncClientStreaming(slot.index, context, reader, queue, queue, arrived);
  }
  void RequestServerStream(const MethodSlot& slot, grpc::ServerContext* context,
                           grpc::ByteBuffer* message,
                           grpc::ServerAsyncWriter<grpc::ByteBuffer>* writer,
                           Event* arrived) override {
    grpc::ServerCompletionQueue* const queue = slot.poller->queue();
    this->RequestAsyncServerStreaming(slot.index, context, message, writer, queue, queue, arrived);
  }
  void RequestBidi(const MethodSlot& slot, grpc::ServerContext* context,
                   grpc::ServerAsyncReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>* stream,
                   Event* arrived) override {
    grpc::ServerCompletionQueue* const queue = slot.poller->queue();
    this->RequestAsyncBidiStreaming(slot.index, context, stream, queue, queue, arrived);
  }
};

template <typename JobType>
std::unique_ptr<Job> MakeJobOf(const Parts* parts, Poller* poller, WorkOwner* owner) {
  return std::make_unique<JobType>(parts, poller, owner);
}

template <typename JobType>
Call* MakeUnary(MethodSlot* slot) {
  return new UnaryCall(slot, &MakeJobOf<JobType>);
}

template <typename CallType>
Call* MakeStream(MethodSlot* slot) {
  return new CallType(slot);
}

// Authorisation is this table and nothing else. tests/rpc/access_test.cc walks it.
struct Handler {
  const char* method;
  Access access;
  Call* (*make_call)(MethodSlot* slot);
};

const Handler kHandlers[] = {
    {"fp8kvd.v1.DecodeAttention.GetServerInfo", Access::kTenant, MakeUnary<InfoJob>},
    {"fp8kvd.v1.DecodeAttention.CreateSequences", Access::kTenant,
     MakeUnary<ControlJob<v1::CreateSequencesRequest, v1::CreateSequencesResponse>>},
    {"fp8kvd.v1.DecodeAttention.Append", Access::kTenant, MakeStream<AppendCall>},
    {"fp8kvd.v1.DecodeAttention.Decode", Access::kTenant, MakeUnary<DecodeJob>},
    {"fp8kvd.v1.DecodeAttention.DecodeStream", Access::kTenant, MakeStream<StreamCall>},
    {"fp8kvd.v1.DecodeAttention.ForkSequences", Access::kTenant,
     MakeUnary<ControlJob<v1::ForkSequencesRequest, v1::ForkSequencesResponse>>},
    {"fp8kvd.v1.DecodeAttention.TruncateSequences", Access::kTenant,
     MakeUnary<ControlJob<v1::TruncateSequencesRequest, v1::TruncateSequencesResponse>>},
    {"fp8kvd.v1.DecodeAttention.FreeSequences", Access::kTenant,
     MakeUnary<ControlJob<v1::FreeSequencesRequest, v1::FreeSequencesResponse>>},
    {"fp8kvd.v1.DecodeAttention.RenewSequences", Access::kTenant,
     MakeUnary<ControlJob<v1::RenewSequencesRequest, v1::RenewSequencesResponse>>},
    {"fp8kvd.v1.DecodeAttention.StatSequences", Access::kTenant,
     MakeUnary<ControlJob<v1::StatSequencesRequest, v1::StatSequencesResponse>>},
    {"fp8kvd.v1.DecodeAttention.ListSequences", Access::kTenant,
     MakeUnary<ControlJob<v1::ListSequencesRequest, v1::ListSequencesResponse>>},
    {"fp8kvd.v1.DecodeAttention.PlanPrecision", Access::kTenant, MakeUnary<PlanJob>},
    {"fp8kvd.v1.DecodeAttention.MeasureKvError", Access::kTenant, MakeUnary<MeasureJob>},
    {"fp8kvd.v1.DecodeAttention.OpenSharedMemory", Access::kTenant, MakeUnary<SharedMemoryJob>},
    {"grpc.health.v1.Health.Check", Access::kAnyone, MakeUnary<HealthJob>},
    {"grpc.health.v1.Health.Watch", Access::kAnyone, MakeStream<WatchCall>},
    {"grpc.reflection.v1alpha.ServerReflection.ServerReflectionInfo", Access::kTenant,
     MakeStream<ReflectionCall>},
};

const google::protobuf::ServiceDescriptor* FindService(const char* name) {
  const auto* service = google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(name);
  FP8KVD_CHECK(service != nullptr);
  return service;
}

template <typename Generated>
std::unique_ptr<RawService> MakeService(const char* name) {
  return std::make_unique<RawServiceOf<Generated>>(FindService(name)->method_count());
}

}  // namespace

Services::Services(ops::Metrics* metrics) {
  const auto add = [&](const char* name, std::unique_ptr<RawService> service) {
    AddMethods(service.get(), name, metrics);
    services_.push_back(std::move(service));
  };
  add(kName, MakeService<v1::DecodeAttention::Service>(kName));
  add(kHealthName, MakeService<grpc::health::v1::Health::Service>(kHealthName));
  add(kReflectionName,
      MakeService<grpc::reflection::v1alpha::ServerReflection::Service>(kReflectionName));
}

void Services::AddMethods(RawService* service, const char* service_name, ops::Metrics* metrics) {
  const google::protobuf::ServiceDescriptor* const descriptor = FindService(service_name);
  for (int i = 0; i < descriptor->method_count(); ++i) {
    const std::string name = descriptor->method(i)->full_name();
    const Handler* found = nullptr;
    for (const Handler& handler : kHandlers) {
      if (name == handler.method) found = &handler;
    }
    FP8KVD_CHECK(found != nullptr);  // a method of the proto that nobody serves
    methods_.push_back({service, i, name, metrics->Method(descriptor->method(i)->name()),
                        found->access, found->make_call});
  }
}

std::vector<grpc::Service*> Services::grpc_services() {
  std::vector<grpc::Service*> services;
  for (const std::unique_ptr<RawService>& service : services_) {
    services.push_back(service->grpc_service());
  }
  return services;
}

void Services::Listen(Parts* parts, Poller* poller) {
  for (const Method& method : methods_) {
    slots_.push_back(std::make_unique<MethodSlot>());
    MethodSlot* const slot = slots_.back().get();
    slot->service = method.service;
    slot->index = method.index;
    slot->parts = parts;
    slot->poller = poller;
    slot->metrics = method.metrics;
    slot->access = method.access;
    method.make_call(slot)->Listen();
  }
}

void Services::Drain(const Poller* poller) {
  for (const std::unique_ptr<MethodSlot>& slot : slots_) {
    if (slot->poller != poller) continue;
    for (Call* const call : slot->open) call->Drain();
  }
}

void Services::Sweep(const Poller* poller) {
  for (const std::unique_ptr<MethodSlot>& slot : slots_) {
    if (slot->poller != poller) continue;
    for (Call* const call : slot->open) call->Sweep();
  }
}

}  // namespace fp8kvd::rpc
