// server/calibrate_call.h: what one decode call costs a client, for fp8kvd --calibrate.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace fp8kvd {

// The median, in microseconds, of decode calls of one sequence of a few tokens to the daemon at
// target, in its first layer that has no sinks: the launch is the least there is, so the rest is
// the call. NOT_FOUND when every layer has sinks.
absl::StatusOr<double> TimeDecodeCalls(const std::string& target);

}  // namespace fp8kvd
