#include "server/rpc/reflection_call.h"

#include "absl/container/flat_hash_set.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/descriptor.pb.h"

#include "server/rpc/control_job.h"
#include "server/rpc/health.h"
#include "server/rpc/services.h"
#include "server/translate/status.h"

namespace fp8kvd::rpc {
namespace {

using google::protobuf::DescriptorPool;
using google::protobuf::FileDescriptor;
using grpc::reflection::v1alpha::ServerReflectionRequest;
using grpc::reflection::v1alpha::ServerReflectionResponse;

// The file after all that it imports, each once.
void AddFile(const FileDescriptor* file, absl::flat_hash_set<const FileDescriptor*>* seen,
             grpc::reflection::v1alpha::FileDescriptorResponse* response) {
  if (!seen->insert(file).second) return;
  for (int i = 0; i < file->dependency_count(); ++i) {
    AddFile(file->dependency(i), seen, response);
  }
  google::protobuf::FileDescriptorProto proto;
  file->CopyTo(&proto);
  response->add_file_descriptor_proto(proto.SerializeAsString());
}

void SetError(const absl::Status& status, ServerReflectionResponse* response) {
  auto* const error = response->mutable_error_response();
  error->set_error_code(static_cast<int>(status.code()));
  error->set_error_message(std::string(status.message()));
}

void AnswerFile(const FileDescriptor* file, ServerReflectionResponse* response) {
  if (file == nullptr) {
    SetError(absl::NotFoundError("no such file or symbol here; list_services names what there is"),
             response);
    return;
  }
  absl::flat_hash_set<const FileDescriptor*> seen;
  AddFile(file, &seen, response->mutable_file_descriptor_response());
}

}  // namespace

ServerReflectionResponse Reflect(const ServerReflectionRequest& request) {
  ServerReflectionResponse response;
  response.set_valid_host(request.host());
  *response.mutable_original_request() = request;
  const DescriptorPool& pool = *DescriptorPool::generated_pool();
  switch (request.message_request_case()) {
    case ServerReflectionRequest::kListServices:
      for (const char* name : {Services::kName, kHealthName, kReflectionName}) {
        response.mutable_list_services_response()->add_service()->set_name(name);
      }
      break;
    case ServerReflectionRequest::kFileByFilename:
      AnswerFile(pool.FindFileByName(request.file_by_filename()), &response);
      break;
    case ServerReflectionRequest::kFileContainingSymbol:
      AnswerFile(pool.FindFileContainingSymbol(request.file_containing_symbol()), &response);
      break;
    case ServerReflectionRequest::kAllExtensionNumbersOfType:
    case ServerReflectionRequest::kFileContainingExtension:
      SetError(absl::NotFoundError("this server has no extensions; ask for a symbol"), &response);
      break;
    case ServerReflectionRequest::MESSAGE_REQUEST_NOT_SET:
      SetError(absl::InvalidArgumentError("message_request is missing; set one of its fields"),
               &response);
      break;
  }
  return response;
}

ReflectionCall::ReflectionCall(MethodSlot* slot)
    : Call(slot),
      on_read_(this, &ReflectionCall::OnRead),
      on_written_(this, &ReflectionCall::OnWritten) {}

void ReflectionCall::Request(Event* arrived) {
  stream_.emplace(&context());
  slot().service->RequestBidi(slot(), &context(), &*stream_, arrived);
}

void ReflectionCall::Read() {
  reading_ = true;
  stream_->Read(&message_, &on_read_);
}

void ReflectionCall::OnRead(bool ok) {
  reading_ = false;
  ServerReflectionRequest request;
  if (finishing()) {
    // The drain has ended the call; this was the read that waited.
  } else if (!ok) {
    stream_->Finish(grpc::Status::OK, Finishing(grpc::Status::OK, 0));
  } else if (const absl::Status status = ParseBounded(&message_, kControlBytesMax, &request);
             !status.ok()) {
    FinishWith(status, 0);
  } else {
    reply_ = translate::Serialize(Reflect(request));
    writing_ = true;
    stream_->Write(reply_, &on_written_);
  }
  RetireIfOver();
}

void ReflectionCall::OnWritten(bool ok) {
  writing_ = false;
  TookReply();
  if (!finishing()) {
    if (!ok || broken_) {
      FinishWith(absl::CancelledError("the stream broke; open another"), 0);
    } else if (parts().draining) {
      OnDrain();
    } else {
      Read();
    }
  }
  RetireIfOver();
}

void ReflectionCall::OnDrain() {
  if (writing_ || finishing()) return;
  FinishWith(absl::UnavailableError("the server drains; ask again after it restarted"), 0);
}

void ReflectionCall::FinishWith(const absl::Status& status, int32_t retry_after_ms) {
  const grpc::Status grpc_status = translate::ToGrpc(status, retry_after_ms);
  stream_->Finish(grpc_status, Finishing(grpc_status, retry_after_ms));
}

void ReflectionCall::Reset() {
  broken_ = false;
  message_.Clear();
  reply_.Clear();
}

}  // namespace fp8kvd::rpc
