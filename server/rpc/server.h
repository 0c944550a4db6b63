// server/rpc/server.h: the gRPC server: the port, the pollers and their threads, drain and
// shutdown.
//
// Promises: the number of threads is fixed at Start, whatever the number of connections, calls and
//   streams. A second server on the same port does not start. After Drain new work is answered
//   UNAVAILABLE by the engine, idle streams end, and Check says NOT_SERVING. Shutdown returns when
//   every call was finished: at its deadline they are cut, and then only launches in flight are
//   waited for.
// Does not manage: the engine, which must answer what it took while Shutdown waits.
// Threads: Start, Drain and Shutdown on one; the pollers are its own.
// Errors: UNAVAILABLE where the address cannot be listened on.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server.h"

#include "config/options.h"
#include "server/ops/metrics.h"
#include "server/rpc/copiers.h"
#include "server/rpc/helper_jobs.h"
#include "server/rpc/helper_thread.h"
#include "server/rpc/job.h"
#include "server/rpc/services.h"
#include "server/rpc/tokens.h"

namespace fp8kvd::rpc {

// Who may connect and call. The default: everybody, in the clear, as tenant 0.
struct Locks {
  std::shared_ptr<grpc::ServerCredentials> credentials = grpc::InsecureServerCredentials();
  const Tokens* tokens = nullptr;  // outlives the server
  int32_t tenants = 1;
};

class Server {
 public:
  // catalog, fleet, clock, metrics and tickets (null: no same-host transport) outlive the server.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const config::ServerOptions& options,
                                                       const translate::Catalog* catalog,
                                                       engine::Fleet* fleet,
                                                       const engine::Clock* clock, Planner planner,
                                                       ops::Metrics* metrics, Locks locks = {},
                                                       shm::TicketBook* tickets = nullptr);
  ~Server();  // after Shutdown
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  int port() const { return port_; }
  int64_t calls_open() const { return parts_.calls_open; }

  void Drain();
  void Shutdown(std::chrono::milliseconds patience);

 private:
  Server(Planner planner, int32_t tenants, ops::Metrics* metrics);

  const Planner planner_;
  Parts parts_;
  Services services_;
  class Sweeper;

  std::vector<std::unique_ptr<Poller>> pollers_;
  std::unique_ptr<Copiers> copiers_;                      // ends before the pollers do
  HelperThread planning_;                                 // ends first: it posts to them
  HelperThread measuring_;                                // so does this
  std::vector<std::unique_ptr<Sweeper>> sweepers_;        // one for each poller
  std::shared_ptr<grpc::ServerCredentials> credentials_;  // gRPC does not hold them
  std::unique_ptr<grpc::Server> server_;
  std::vector<std::thread> threads_;
  int port_ = 0;
};

}  // namespace fp8kvd::rpc
