#include "server/shm/server.h"

#include <thread>
#include <utility>

namespace fp8kvd::shm {
namespace {

// With no more cores than these whoever spins takes the one that the answer is computed on: 203 us
// a call instead of 59 on two cores, kernels on the CPU.
constexpr unsigned kCoresToSpin = 4;

}  // namespace

Server::Server(const config::SharedMemoryOptions& options, const translate::Catalog* catalog,
               engine::Fleet* fleet, const engine::Clock* clock, ops::Metrics* metrics)
    : options_(options),
      tickets_(TicketLimits{}, clock),
      quota_({.sessions_max = options.shm_sessions_max,
              .sessions_per_tenant_max = options.shm_sessions_per_tenant_max,
              .bytes_per_tenant_max = options.shm_tenant_bytes_max}),
      parts_{
          .catalog = catalog,
          .fleet = fleet,
          .clock = clock,
          .quota = &quota_,
          .decodes = metrics->Method("SharedMemoryDecode"),
          .appends = metrics->Method("SharedMemoryAppend"),
          .inflight_max = options.shm_inflight_max,
          .spin_us = std::thread::hardware_concurrency() > kCoresToSpin ? options.shm_spin_us : 0},
      door_({.session_bytes_max = static_cast<uint64_t>(options.shm_session_bytes_max)}, &tickets_,
            &quota_, &loops_, clock) {
  for (int32_t i = 0; i < options.shm_threads; ++i) {
    loops_.push_back(std::make_unique<Loop>(&parts_));
  }
}

Server::~Server() = default;

absl::Status Server::Listen(int port) {
  std::string path = options_.shm_socket;
  if (path.empty()) {
    absl::StatusOr<std::string> standard = DefaultSocketPath(port);
    if (!standard.ok()) return standard.status();
    path = *std::move(standard);
  }
  absl::StatusOr<std::unique_ptr<SocketFile>> file =
      SocketFile::Listen(path, options_.shm_group_access);
  if (!file.ok()) return file.status();
  door_.Open(*std::move(file));
  tickets_.SetSocket(path);
  return absl::OkStatus();
}

void Server::Drain() {
  tickets_.SetSocket("");
  door_.Close();
  for (const std::unique_ptr<Loop>& loop : loops_) loop->Drain();
}

void Server::Stop(std::chrono::milliseconds patience) {
  Drain();
  const auto until = std::chrono::steady_clock::now() + patience;
  while (stats().sessions > 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (const std::unique_ptr<Loop>& loop : loops_) loop->Stop();
}

}  // namespace fp8kvd::shm
