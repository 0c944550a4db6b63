// server/shm/server.h: the same-host transport as a whole: tickets, the door, the loops.
//
// Promises: threads are fixed at Start. Nothing listens before Listen. After Drain no session
//   begins, and those that there are end once nothing of theirs is in flight. After Stop all have
//   ended, for which the engine must answer what it took.
// Threads: one, but tickets() and stats() from any.
// Errors: UNAVAILABLE where the socket cannot be had.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"

#include "config/options.h"
#include "server/engine/fleet.h"
#include "server/ops/metrics.h"
#include "server/shm/door.h"
#include "server/shm/loop.h"
#include "server/shm/quota.h"
#include "server/shm/tickets.h"
#include "server/translate/catalog.h"

namespace fp8kvd::shm {

class Server {
 public:
  // catalog, fleet, clock and metrics outlive the server.
  Server(const config::SharedMemoryOptions& options, const translate::Catalog* catalog,
         engine::Fleet* fleet, const engine::Clock* clock, ops::Metrics* metrics);
  ~Server();  // after Stop
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // port: of gRPC, a part of the default path's name.
  absl::Status Listen(int port);
  void Drain();
  // Sessions have so long to end by themselves after Drain.
  void Stop(std::chrono::milliseconds patience);

  TicketBook* tickets() { return &tickets_; }
  ops::SharedMemoryStats stats() const { return quota_.stats(); }

 private:
  const config::SharedMemoryOptions options_;
  TicketBook tickets_;
  Quota quota_;
  Parts parts_;
  std::vector<std::unique_ptr<Loop>> loops_;
  Door door_;
};

}  // namespace fp8kvd::shm
