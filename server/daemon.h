// server/daemon.h: builds the parts in order, runs until told to stop or until the device fails,
// and takes the parts down in reverse.
//
// Exit codes: 0 after a drain, 1 could not start (the log says why), 3 the device failed, 4 after a
//   drain whose sequences should have been saved and are not; main's own is 2, for flags and
//   configurations that it refuses.
// Threads: fixed once ready: this one, the engine's with its workers, pollers, those of shared
//   memory and its door, two helpers, eight for HTTP.
// Signals: SIGTERM and SIGINT drain; a second one while draining changes nothing. SIGHUP reads the
//   configuration (reload.h) and tokens_file again; TLS files are read when they change. Under
//   systemd (ops/notify.h) it says when it is ready, reloads, stops and is alive.
#pragma once

#include "config/load.h"
#include "server/reload.h"

namespace fp8kvd {

inline constexpr int kExitDrained = 0;
inline constexpr int kExitNotStarted = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitDeviceFailed = 3;
inline constexpr int kExitNotSaved = 4;

// load_again: reads flags, environment and file once more, for SIGHUP (reload.h).
int RunDaemon(config::Loaded loaded, const LoadConfig& load_again);

// fp8kvd --calibrate: times attention on the configured device, and a decode call to a daemon of
// this configuration on a loopback port of its own; writes policy.calibration_file whole or not at
// all. Takes what the daemon takes, so not beside one on the same device.
int RunCalibration(const config::Loaded& loaded);

}  // namespace fp8kvd
