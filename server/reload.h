// server/reload.h: SIGHUP: reads flags, environment and file again and takes over what can change
// while the daemon runs: log_level, and the bounds of tenants. Of everything else it says that a
// restart is needed; a configuration that is wrong changes nothing.
#pragma once

#include <functional>

#include "absl/status/statusor.h"

#include "config/load.h"
#include "server/engine/fleet.h"

namespace fp8kvd {

using LoadConfig = std::function<absl::StatusOr<config::Loaded>()>;

// `loaded` is what runs; it gets what was taken over.
void ReloadConfig(const LoadConfig& load_again, config::Loaded* loaded, engine::Fleet* fleet);

}  // namespace fp8kvd
