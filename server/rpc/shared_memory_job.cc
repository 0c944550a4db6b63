#include "server/rpc/shared_memory_job.h"

#include <utility>

#include "server/rpc/control_job.h"

namespace fp8kvd::rpc {

Job::Next SharedMemoryJob::Begin(grpc::ByteBuffer* bytes, const Arrival& arrival) {
  v1::OpenSharedMemoryRequest request;
  status_ = ParseBounded(bytes, kControlBytesMax, &request);
  if (!status_.ok()) return Next::kAnswer;
  const std::string& host_id = parts().catalog->host_id;
  if (parts().tickets == nullptr) {
    status_ = absl::UnavailableError(
        "the same-host transport is off here; use Decode, DecodeStream and Append");
  } else if (!request.host_id().empty() && request.host_id() != host_id) {
    status_ = absl::FailedPreconditionError(
        "host_id is another host's, shared memory serves this one alone; use Decode, DecodeStream "
        "and Append");
  } else {
    absl::StatusOr<shm::Ticket> ticket = parts().tickets->Issue(arrival.tenant);
    status_ = ticket.status();
    if (ticket.ok()) ticket_ = *std::move(ticket);
  }
  return Next::kAnswer;
}

absl::Status SharedMemoryJob::Answer(grpc::ByteBuffer* reply) {
  if (!status_.ok()) return status_;
  v1::OpenSharedMemoryResponse response;
  response.set_ticket(ticket_.text);
  response.set_unix_socket(ticket_.unix_socket);
  *reply = translate::Serialize(response);
  return absl::OkStatus();
}

}  // namespace fp8kvd::rpc
