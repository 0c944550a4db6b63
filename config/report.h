// config/report.h: what a loaded configuration comes to, as text: fp8kvd --check_config prints it,
// the daemon logs its parts at start.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "config/load.h"
#include "config/model.h"

namespace fp8kvd::config {

// Every key with its value, as a .textproto that loads to the same Options; a comment says where a
// value that is no default came from.
std::string EffectiveConfig(const Loaded& loaded);

// A model's shape, its decision with every number, and its groups with their pools: one line each.
std::vector<std::string> ModelLines(const PlannedModel& model, const ModelPools& pools);

// All of the above, with the sum of the pools. bytes_free: of the device, for pool_fraction; 0
// while there is no device: then pools are shown at the models' own need. The errors of PlanPools.
absl::StatusOr<std::string> CheckReport(const Loaded& loaded, int64_t bytes_free,
                                        const BlockBytesFn& block_bytes);

}  // namespace fp8kvd::config
