#include "server/shm/quota.h"

#include "absl/strings/str_cat.h"

#include "config/base/check.h"

namespace fp8kvd::shm {

absl::Status Quota::Take(cache::TenantId tenant, int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = held_.find(tenant);
  const Held held = found == held_.end() ? Held{} : found->second;
  if (stats_.sessions >= limits_.sessions_max || held.sessions >= limits_.sessions_per_tenant_max ||
      bytes > limits_.bytes_per_tenant_max - held.bytes) {
    ++stats_.refused_total;
    return absl::ResourceExhaustedError(absl::StrCat(
        "a session of ", bytes, " bytes beside ", held.sessions, " of yours with ", held.bytes,
        " bytes and ", stats_.sessions, " in all, allowed are ", limits_.sessions_per_tenant_max,
        " and ", limits_.bytes_per_tenant_max, " bytes of one tenant and ", limits_.sessions_max,
        " in all; close one, ask for less, or use gRPC"));
  }
  Held& now = held_[tenant];
  ++now.sessions;
  now.bytes += bytes;
  ++stats_.sessions;
  ++stats_.opened_total;
  stats_.bytes += bytes;
  return absl::OkStatus();
}

void Quota::GiveBack(cache::TenantId tenant, int64_t bytes, bool has_lied) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = held_.find(tenant);
  FP8KVD_CHECK(found != held_.end() && found->second.bytes >= bytes);
  found->second.bytes -= bytes;
  if (--found->second.sessions == 0) held_.erase(found);
  --stats_.sessions;
  stats_.bytes -= bytes;
  if (has_lied) ++stats_.ended_for_lies_total;
}

ops::SharedMemoryStats Quota::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

}  // namespace fp8kvd::shm
