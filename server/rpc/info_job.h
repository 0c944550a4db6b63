// server/rpc/info_job.h: GetServerInfo, from the catalog and a copy of the engine's counters: it is
// answered while the engine drains too.
#pragma once

#include "server/rpc/job.h"

namespace fp8kvd::rpc {

class InfoJob final : public Job {
 public:
  using Job::Job;
  Next Begin(grpc::ByteBuffer* bytes, const Arrival& arrival) override;
  absl::Status Answer(grpc::ByteBuffer* reply) override;

 private:
  absl::Status status_;
  cache::TenantId tenant_{0};
};

}  // namespace fp8kvd::rpc
