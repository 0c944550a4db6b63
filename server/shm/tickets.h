// server/shm/tickets.h: single-use tickets: an authenticated call gets one, a stranger on the unix
// socket becomes that call's tenant by it.
//
// Promises: a ticket is 256 random bits, redeemed at most once and only until it expires. At most
//   outstanding_max are neither, of one tenant outstanding_per_tenant_max.
// Threads: any, one mutex. Errors: RESOURCE_EXHAUSTED (too many), NOT_FOUND (none such),
//   UNAVAILABLE (nobody listens on the socket).
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "server/engine/clock.h"
#include "server/engine/messages.h"

namespace fp8kvd::shm {

struct TicketLimits {
  int64_t ttl_ms = 10'000;  // a client connects at once
  size_t outstanding_max = 256;
  size_t outstanding_per_tenant_max = 64;
};

struct Ticket {
  std::string text;         // kTicketBytes characters
  std::string unix_socket;  // where to present it
};

class TicketBook {
 public:
  // `clock` outlives the book.
  TicketBook(const TicketLimits& limits, const engine::Clock* clock)
      : limits_(limits), clock_(clock) {}

  // Where tickets are taken; empty: nowhere (any more), and all that are outstanding end.
  void SetSocket(const std::string& path);
  std::string unix_socket() const;

  absl::StatusOr<Ticket> Issue(cache::TenantId tenant);
  // The tenant that it was issued to.
  absl::StatusOr<cache::TenantId> Redeem(absl::string_view text);

 private:
  struct Entry {
    std::string text;
    cache::TenantId tenant;
    int64_t expires_us = 0;
  };
  void DropExpired();

  const TicketLimits limits_;
  const engine::Clock* const clock_;
  mutable std::mutex mutex_;
  std::string socket_;          // guarded by mutex_, as is the next
  std::vector<Entry> entries_;  // oldest first
};

}  // namespace fp8kvd::shm
