#include "server/rpc/info_job.h"

#include "server/rpc/control_job.h"

namespace fp8kvd::rpc {

Job::Next InfoJob::Begin(grpc::ByteBuffer* bytes, const Arrival& arrival) {
  tenant_ = arrival.tenant;
  v1::GetServerInfoRequest request;
  status_ = ParseBounded(bytes, kControlBytesMax, &request);
  return Next::kAnswer;
}

absl::Status InfoJob::Answer(grpc::ByteBuffer* reply) {
  if (!status_.ok()) return status_;
  v1::GetServerInfoResponse response = translate::ServerInfo(*parts().catalog);
  // Its own part of the pools: what others have there is not for it.
  const engine::EngineStats stats = parts().fleet->stats();
  for (const engine::PoolStats& pool : stats.tenants[static_cast<uint32_t>(tenant_)].pools) {
    v1::LayerGroupInfo* const info =
        response.mutable_models(pool.model)->mutable_groups(pool.group);
    info->set_pages_total(pool.pages_total);
    info->set_pages_used(pool.pages_used);
    info->set_pages_free(pool.pages_free);
  }
  if (parts().tickets != nullptr) response.set_shm_socket(parts().tickets->unix_socket());
  response.set_draining(parts().draining);
  *reply = translate::Serialize(response);
  return absl::OkStatus();
}

}  // namespace fp8kvd::rpc
