#include "server/rpc/info_job.h"

#include "server/rpc/control_job.h"

namespace fp8kvd::rpc {
namespace {

template <typename Info>
void AddPages(const engine::PoolStats& pool, Info* info) {
  info->set_pages_total(info->pages_total() + static_cast<uint64_t>(pool.pages_total));
  info->set_pages_used(info->pages_used() + static_cast<uint64_t>(pool.pages_used));
  info->set_pages_free(info->pages_free() + static_cast<uint64_t>(pool.pages_free));
}

}  // namespace

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
  const std::vector<engine::EngineStats> devices = parts().fleet->device_stats();
  for (size_t i = 0; i < devices.size(); ++i) {
    const engine::TenantStats& mine = devices[i].tenants[static_cast<uint32_t>(tenant_)];
    for (const engine::PoolStats& pool : mine.pools) {
      AddPages(pool, response.mutable_models(pool.model)->mutable_groups(pool.group));
      if (i < static_cast<size_t>(response.devices_size())) {
        AddPages(pool, response.mutable_devices(static_cast<int>(i)));
      }
    }
  }
  if (parts().tickets != nullptr) response.set_shm_socket(parts().tickets->unix_socket());
  response.set_draining(parts().draining);
  *reply = translate::Serialize(response);
  return absl::OkStatus();
}

}  // namespace fp8kvd::rpc
