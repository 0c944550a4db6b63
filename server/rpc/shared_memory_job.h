// server/rpc/shared_memory_job.h: OpenSharedMemory: a ticket for whoever may make this call.
#pragma once

#include <string>

#include "server/rpc/job.h"

namespace fp8kvd::rpc {

class SharedMemoryJob final : public Job {
 public:
  using Job::Job;
  Next Begin(grpc::ByteBuffer* bytes, const Arrival& arrival) override;
  absl::Status Answer(grpc::ByteBuffer* reply) override;

 private:
  absl::Status status_;
  shm::Ticket ticket_;
};

}  // namespace fp8kvd::rpc
