// config/security.h: what the parts of SecurityOptions and TenantOptions say together: whether they
// fit, what each tenant's share comes to, and which doors stand open.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"

#include "config/options.h"

namespace fp8kvd::config {

// Checks, and fills in the shares of options->tenants; afterwards there is one at least.
// INVALID_ARGUMENT: files without their partners, tenants that nothing tells apart or that share a
// name, and a queue, slots, streams or sequences too few to give every tenant a part.
absl::Status FinishSecurity(Options* options);

// A line for each door that is reachable from other machines and lacks a lock: for the log.
std::vector<std::string> OpenDoors(const Options& options);

}  // namespace fp8kvd::config
