// client/cc/ctl/http_get.h: one GET from a daemon's HTTP port.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace fp8kvd::ctl {

// The body of a 200. address: host:port or [IPv6]:port. UNAVAILABLE when it cannot be reached, does
// not answer within timeout_ms for each step, or answers something else.
absl::StatusOr<std::string> HttpGet(const std::string& address, const std::string& path,
                                    int32_t timeout_ms);

}  // namespace fp8kvd::ctl
