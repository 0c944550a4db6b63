#include "server/daemon.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "google/protobuf/stubs/logging.h"
#include "spdlog/spdlog.h"

#include "config/model.h"
#include "config/report.h"
#include "server/calibrate.h"
#include "server/calibrate_call.h"
#include "server/device.h"
#include "server/engine/fleet.h"
#include "server/engines.h"
#include "server/housekeeping.h"
#include "server/live_load.h"
#include "server/make_catalog.h"
#include "server/malloc_options.h"
#include "server/ops/http.h"
#include "server/ops/log.h"
#include "server/ops/metrics.h"
#include "server/ops/notify.h"
#include "server/ops/readiness.h"
#include "server/process_limits.h"
#include "server/reload.h"
#include "server/rpc/server.h"
#include "server/rpc/tls.h"
#include "server/shm/server.h"
#include "server/signals.h"
#include "server/snapshot_keeper.h"
#include "server/version.h"

namespace fp8kvd {
namespace {

// Beyond snapshot_ms_max: for the last write that waits for a disk, and for the exit.
constexpr int64_t kLastWritesMs = 5000;

// Everything that runs, in the order in which it is built.
struct Parts {
  config::Loaded loaded;
  engine::SteadyClock clock;
  ops::Readiness readiness;
  ops::Metrics metrics;
  std::unique_ptr<SnapshotKeeper> snapshots;  // null: sequences end with the run
  std::unique_ptr<Engines> engines;
  std::unique_ptr<LiveLoad> live_load;
  translate::Catalog catalog;
  std::unique_ptr<Housekeeping> housekeeping;
  std::unique_ptr<rpc::Tokens> tokens;  // null: nobody needs one
  std::unique_ptr<shm::Server> shm;
  std::unique_ptr<rpc::Server> rpc;
  std::unique_ptr<ops::HttpServer> http;  // ends first: a scrape reads all of the above
};

std::vector<std::string> TenantNames(const config::Options& options) {
  std::vector<std::string> names;
  for (const config::TenantOptions& tenant : options.tenants) names.push_back(tenant.name);
  return names;
}

absl::Status MakeLocks(const config::Options& options, Parts* parts, rpc::Locks* locks) {
  auto credentials = rpc::MakeCredentials(
      options.security, [](const std::string& text) { spdlog::warn("{}", text); });
  if (!credentials.ok()) return credentials.status();
  locks->credentials = *std::move(credentials);
  if (options.security.tokens_file.empty()) return absl::OkStatus();
  std::vector<std::string> names = TenantNames(options);
  absl::StatusOr<std::unique_ptr<rpc::Tokens>> tokens =
      rpc::Tokens::Load(options.security.tokens_file, std::move(names));
  if (!tokens.ok()) return tokens.status();
  parts->tokens = *std::move(tokens);
  locks->tokens = parts->tokens.get();
  locks->tenants = static_cast<int32_t>(options.tenants.size());
  return absl::OkStatus();
}

// At SIGHUP. Certificates need none: they are looked at as connections come.
void ReloadTokens(const Parts& parts) {
  if (parts.tokens == nullptr) return;
  const absl::Status status = parts.tokens->Reload();
  if (status.ok()) {
    spdlog::info("tokens_file was read again");
  } else {
    spdlog::warn("the tokens before stay in use: {}", std::string(status.message()));
  }
}

// On a path of its own choosing that cannot be had, the daemon runs without.
absl::Status OpenSharedMemory(const config::SharedMemoryOptions& options, Parts* parts) {
  if (parts->shm == nullptr) return absl::OkStatus();
  const absl::Status status = parts->shm->Listen(parts->rpc->port());
  if (status.ok()) {
    spdlog::info("shared memory on {}", parts->shm->tickets()->unix_socket());
  } else if (options.shm_socket.empty()) {
    spdlog::warn("no shared memory, clients of this machine use gRPC: {}",
                 std::string(status.message()));
    return absl::OkStatus();
  }
  return status;
}

absl::Status StartDoors(Parts* parts) {
  const config::Loaded& loaded = parts->loaded;
  ops::MetricLabels labels{.version = kVersion,
                           .compiler = kCompiler,
                           .incarnation = absl::StrCat(absl::Hex(parts->catalog.incarnation)),
                           .device = parts->catalog.device_kind,
                           .device_name = parts->catalog.devices.front().model,
                           .has_cuda = kHasCuda,
                           .models = {},
                           .tenants = TenantNames(loaded.options)};
  for (const translate::CatalogModel& model : parts->catalog.models) {
    labels.models.push_back({.name = model.geometry.name, .group_precisions = {}});
    for (const LayerGroup& group : model.geometry.groups) {
      labels.models.back().group_precisions.emplace_back(config::PrecisionName(group.precision));
    }
  }
  for (const translate::CatalogDevice& device : parts->catalog.devices) {
    labels.devices.push_back({.name = device.name, .model = device.model});
  }
  parts->metrics.SetEngines(
      std::move(labels), [parts] { return parts->engines->fleet().device_stats(); },
      [parts](int32_t model) {
        const std::optional<config::LiveVerdict> v = parts->live_load->Of(model);
        return v.has_value() ? ops::LoadSample{v->batch, v->tokens, v->cache_share}
                             : ops::LoadSample{};
      });
  for (const Device& device : parts->engines->devices()) {
    const std::string pci_bus_id = device.backend->Device().pci_bus_id;
    if (pci_bus_id.empty()) continue;
    absl::StatusOr<std::unique_ptr<ops::Nvml>> nvml =
        ops::Nvml::Open(ops::Nvml::kLibrary, pci_bus_id);
    if (nvml.ok()) {
      parts->metrics.AddGpu(device.name, *std::move(nvml));
    } else {
      spdlog::warn("{}", std::string(nvml.status().message()));
    }
  }
  const config::ServerOptions& options = loaded.options.server;
  rpc::Locks locks;
  if (absl::Status status = MakeLocks(loaded.options, parts, &locks); !status.ok()) return status;
  const config::SharedMemoryOptions& shm_options = loaded.options.shared_memory;
  if (shm_options.shm_enabled) {
    parts->shm = std::make_unique<shm::Server>(
        shm_options, &parts->catalog, &parts->engines->fleet(), &parts->clock, &parts->metrics);
    parts->metrics.SetSharedMemory([parts] { return parts->shm->stats(); });
  }
  rpc::Planner planner{.policy = loaded.options.policy,
                       .calibration = loaded.calibration,
                       .models = loaded.options.models,
                       .live = [parts](int32_t model) { return parts->live_load->Of(model); }};
  absl::StatusOr<std::unique_ptr<rpc::Server>> server = rpc::Server::Start(
      options, &parts->catalog, &parts->engines->fleet(), &parts->clock, std::move(planner),
      &parts->metrics, std::move(locks), parts->shm == nullptr ? nullptr : parts->shm->tickets());
  if (!server.ok()) return server.status();
  parts->rpc = *std::move(server);
  absl::Status opened = OpenSharedMemory(shm_options, parts);
  if (!opened.ok()) return opened;
  if (options.http_address.empty()) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<ops::HttpServer>> http = ops::HttpServer::Start(
      options.http_address, {.readiness = &parts->readiness,
                             .metrics = [parts] { return parts->metrics.Scrape(); },
                             .status_json = [parts] { return parts->housekeeping->StatusJson(); },
                             .is_stalled = [parts] { return parts->housekeeping->is_stalled(); }});
  if (!http.ok()) return http.status();
  parts->http = *std::move(http);
  return absl::OkStatus();
}

// Whole or not at all: readers wait for the file to appear.
absl::Status WriteWhole(const std::string& path, const std::string& text, const char* what) {
  const std::string unfinished = path + ".part";
  std::FILE* const file = std::fopen(unfinished.c_str(), "w");
  bool written = file != nullptr && std::fputs(text.c_str(), file) >= 0;
  if (file != nullptr) written = std::fclose(file) == 0 && written;
  if (written && std::rename(unfinished.c_str(), path.c_str()) == 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot write ", what, " ", path, ": ",
                                             std::generic_category().message(errno),
                                             "; name a file in a folder that exists and is ours"));
}

std::string HostOf(const std::string& address) { return address.substr(0, address.rfind(':')); }

// Refuses new work, finishes what was admitted, closes the doors.
void Drain(std::chrono::milliseconds patience, Parts* parts) {
  const auto until = std::chrono::steady_clock::now() + patience;
  parts->engines->fleet().Drain();
  if (parts->rpc != nullptr) {
    parts->rpc->Drain();
    if (parts->shm != nullptr) parts->shm->Drain();
    parts->rpc->Shutdown(patience);
  }
  if (parts->shm != nullptr) {
    const auto left = until - std::chrono::steady_clock::now();
    parts->shm->Stop(std::chrono::duration_cast<std::chrono::milliseconds>(left));
  }
  parts->engines->Join();
}

absl::Status Start(Parts* parts) {
  if (!parts->loaded.options.drain.snapshot_dir.empty()) {
    absl::StatusOr<std::unique_ptr<SnapshotKeeper>> snapshots =
        SnapshotKeeper::Open(parts->loaded.options.drain, &parts->clock);
    if (!snapshots.ok()) return snapshots.status();
    parts->snapshots = *std::move(snapshots);
    parts->metrics.SetSnapshots([parts] { return parts->snapshots->stats(); });
  }
  absl::StatusOr<std::unique_ptr<Engines>> engines = Engines::Make(&parts->loaded, &parts->clock);
  if (!engines.ok()) return engines.status();
  parts->engines = *std::move(engines);
  if (parts->snapshots != nullptr) {
    absl::Status status = parts->snapshots->Restore(&parts->engines->fleet());
    if (!status.ok()) return status;
  }
  parts->catalog = MakeCatalog(parts->loaded, *parts->engines);
  parts->housekeeping = std::make_unique<Housekeeping>(
      parts->catalog, TenantNames(parts->loaded.options), &parts->readiness, &parts->metrics,
      &parts->clock, [parts] { return parts->engines->fleet().device_stats(); });
  parts->live_load = std::make_unique<LiveLoad>(
      &parts->loaded, &parts->clock, [parts] { return parts->engines->fleet().stats(); });
  parts->engines->Run();
  return StartDoors(parts);
}

// Tells whoever waits for the daemon that it is ready.
absl::Status Announce(Parts* parts) {
  const config::ServerOptions& options = parts->loaded.options.server;
  parts->readiness.Set(ops::State::kReady);
  const absl::Status status =
      options.port_file.empty()
          ? absl::OkStatus()
          : WriteWhole(options.port_file, absl::StrCat(parts->rpc->port(), "\n"), "port_file");
  if (!status.ok()) return status;
  const std::string address = absl::StrCat(HostOf(options.listen_address), ":", parts->rpc->port());
  if (parts->http != nullptr) {
    spdlog::info("status, metrics and probes on http://{}:{}", HostOf(options.http_address),
                 parts->http->port());
  }
  spdlog::info("fp8kvd {} is ready on {}", kVersion, address);
  std::printf("fp8kvd listening on %s\n", address.c_str());
  std::fflush(stdout);
  return absl::OkStatus();
}

// Serves until a signal stops it, which it returns.
int ServeUntilStopped(const Signals& signals, const ops::Notifier& notifier,
                      const LoadConfig& load_again, Parts* parts) {
  const std::chrono::milliseconds interval =
      notifier.AliveEvery(std::chrono::milliseconds(ops::History::kIntervalMs));
  for (;;) {
    parts->housekeeping->Look();
    // An engine that is stuck is not alive: systemd ends the process and starts another.
    if (!parts->housekeeping->is_stalled()) notifier.Alive();
    const int signal = signals.WaitFor(interval);
    const bool last = signal == SIGTERM || signal == SIGINT;
    for (const std::string& hint : parts->live_load->Tick(last)) spdlog::warn("{}", hint);
    if (signal == SIGHUP) {
      notifier.Tell("RELOADING=1", "reads its configuration again");
      ReloadConfig(load_again, &parts->loaded, &parts->engines->fleet());
      ReloadTokens(*parts);
      notifier.Tell("READY=1", "serves");
    } else if (signal != 0) {
      return signal;
    }
  }
}

// Sums that must agree once everything was answered.
void LogDrained(const engine::EngineStats& stats) {
  uint64_t taken = 0;
  uint64_t answered = 0;
  uint64_t failed = 0;
  for (int32_t i = 0; i < engine::EngineStats::kKinds; ++i) {
    taken += stats.requests_taken_total[i];
    answered += stats.requests_answered_total[i];
    failed += stats.requests_failed_total[i];
  }
  spdlog::info("drained: {} requests taken, {} answered, {} of them with an error", taken, answered,
               failed);
}

void SetUpProcess(const config::Loaded& loaded) {
  TuneMalloc();
  ops::SetUpLog(loaded.options.log);
  // Else every message that a client spoils is a line of protobuf's own on stderr; whoever parses
  // answers with a Status.
  google::protobuf::SetLogHandler(nullptr);
  spdlog::info("{}", SetProcessLimits());
}

// Of a start that failed: for the next one. Whoever reached a door may have changed them.
void KeepSequences(Parts* parts) {
  if (parts->snapshots == nullptr) return;
  if (parts->rpc == nullptr) {
    parts->snapshots->GiveBack();
  } else if (!parts->engines->failed()) {
    parts->snapshots->Save(&parts->engines->fleet());
  }
}

// The median of so many decode calls to a daemon of this configuration, over loopback, of one
// sequence of a few tokens: what a call costs besides attention.
absl::StatusOr<double> MeasureCallUs(const config::Loaded& loaded) {
  Parts parts;
  parts.loaded = loaded;
  parts.loaded.calibration.reset();
  parts.loaded.warnings.clear();
  config::ServerOptions& server = parts.loaded.options.server;
  server.listen_address = "127.0.0.1:0";
  server.http_address.clear();
  parts.loaded.options.security = {};  // a port of its own, for a moment, on loopback
  parts.loaded.options.drain.snapshot_dir.clear();
  const absl::Status status = Start(&parts);
  const absl::StatusOr<double> call_us =
      status.ok() ? TimeDecodeCalls(absl::StrCat("127.0.0.1:", parts.rpc->port()))
                  : absl::StatusOr<double>(status);
  if (parts.engines != nullptr && parts.engines->is_running()) {
    Drain(std::chrono::milliseconds(loaded.options.drain.drain_ms_max), &parts);
  }
  return call_us;
}

absl::Status CalibrateInto(const config::Loaded& loaded) {
  const std::string& path = loaded.options.policy.calibration_file;
  if (path.empty()) {
    return absl::InvalidArgumentError(
        "calibration_file is empty, it names the file that is written; add "
        "policy { calibration_file: … } to the configuration, or --calibration_file=PATH");
  }
  config::Calibration calibration;
  {
    absl::StatusOr<Devices> devices = MakeDevices(loaded.options.engine);
    if (!devices.ok()) return devices.status();
    kernels::Backend* const backend = devices->all.front().backend.get();
    const engine::SteadyClock clock;
    std::vector<ModelGeometry> geometries;
    for (const config::PlannedModel& model : loaded.models) geometries.push_back(model.geometry);
    absl::StatusOr<config::Calibration> measured =
        Calibrate({.backend = backend,
                   .clock = &clock,
                   .models = geometries,
                   .launch_bytes_max = CalibrationLaunchBytes(backend->Device()),
                   .progress = [](const std::string& line) { spdlog::info("{}", line); }});
    if (!measured.ok()) return measured.status();
    calibration = *std::move(measured);
  }
  calibration.version = kVersion;
  const absl::StatusOr<double> call_us = MeasureCallUs(loaded);
  if (!call_us.ok()) return call_us.status();
  calibration.call_us = *call_us;
  spdlog::info("{} ({}): reads {:.1f} GB/s, a decode call over loopback takes {:.0f} us",
               calibration.device_kind, calibration.device_name,
               calibration.read_bytes_per_s * 1e-9, calibration.call_us);
  absl::Status status =
      WriteWhole(path, config::FormatCalibration(calibration), "calibration_file");
  if (status.ok()) spdlog::info("wrote {}", path);
  return status;
}

}  // namespace

int RunCalibration(const config::Loaded& loaded) {  // signals end it: it holds nothing for others
  SetUpProcess(loaded);
  const absl::Status done = CalibrateInto(loaded);
  if (done.ok()) return 0;
  spdlog::error("cannot calibrate: {}", std::string(done.message()));
  return kExitNotStarted;
}

int RunDaemon(config::Loaded loaded, const LoadConfig& load_again) {
  const Signals signals;
  const ops::Notifier notifier;
  SetUpProcess(loaded);
  const std::chrono::milliseconds patience(loaded.options.drain.drain_ms_max);
  Parts parts;
  parts.loaded = std::move(loaded);
  absl::Status started = Start(&parts);
  if (started.ok()) started = Announce(&parts);
  if (!started.ok()) {
    spdlog::error("cannot start: {}", std::string(started.message()));
    if (parts.engines != nullptr && parts.engines->is_running()) Drain(patience, &parts);
    KeepSequences(&parts);
    return kExitNotStarted;
  }
  if (parts.snapshots != nullptr) parts.snapshots->Served();
  notifier.Tell("READY=1", "serves");
  const int signal = ServeUntilStopped(signals, notifier, load_again, &parts);
  const bool failed = parts.engines->failed();
  parts.readiness.Set(failed ? ops::State::kFailed : ops::State::kDraining);
  notifier.Tell("STOPPING=1", parts.readiness.Why());
  if (!failed) spdlog::info("signal {}: draining for at most {} ms", signal, patience.count());
  Drain(patience, &parts);
  if (parts.engines->failed()) {
    spdlog::error("the device failed: {}", parts.engines->Fault());
    return kExitDeviceFailed;
  }
  LogDrained(parts.engines->fleet().stats());
  if (parts.snapshots == nullptr) return kExitDrained;
  const int64_t allowed_us =
      (parts.loaded.options.drain.snapshot_ms_max + kLastWritesMs) * int64_t{1000};
  notifier.Tell(absl::StrCat("EXTEND_TIMEOUT_USEC=", allowed_us), "saves its sequences");
  return parts.snapshots->Save(&parts.engines->fleet()) ? kExitDrained : kExitNotSaved;
}

}  // namespace fp8kvd
