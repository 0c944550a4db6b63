// server/shm/quota.h: how many sessions and bytes of shared memory there may be, in all and of one
// tenant; and what a scrape wants to know of them.
// Threads: any, one mutex. Errors: RESOURCE_EXHAUSTED with what is held and what is allowed.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "absl/status/status.h"

#include "server/engine/messages.h"
#include "server/ops/metrics.h"

namespace fp8kvd::shm {

struct QuotaLimits {
  int64_t sessions_max = 64;
  int64_t sessions_per_tenant_max = 64;
  int64_t bytes_per_tenant_max = int64_t{2} << 30;
};

class Quota {
 public:
  explicit Quota(const QuotaLimits& limits) : limits_(limits) {}

  absl::Status Take(cache::TenantId tenant, int64_t bytes);
  void GiveBack(cache::TenantId tenant, int64_t bytes, bool has_lied);

  ops::SharedMemoryStats stats() const;

 private:
  struct Held {
    int64_t sessions = 0;
    int64_t bytes = 0;
  };

  const QuotaLimits limits_;
  mutable std::mutex mutex_;
  std::map<cache::TenantId, Held> held_;  // guarded by mutex_, as are the rest
  ops::SharedMemoryStats stats_;
};

}  // namespace fp8kvd::shm
