// client/cc/ctl/files.h: a whole file as bytes.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace fp8kvd::ctl {

// NOT_FOUND when it cannot be opened, INVALID_ARGUMENT when it is no regular file or holds more
// than bytes_max (checked before anything is read).
absl::StatusOr<std::string> ReadFile(const std::string& path, uint64_t bytes_max);

}  // namespace fp8kvd::ctl
