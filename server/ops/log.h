// server/ops/log.h: sets up spdlog for the process: to stderr, as text or as one JSON object a
// line.
//
// Promises: a line of the log is one line: control characters, quotes (JSON) and bytes that are no
//   UTF-8 are escaped in every message, so nothing that a client sends can forge another line.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

#include "config/options.h"

namespace fp8kvd::ops {

void SetUpLog(const config::LogOptions& options);
// From now on; any thread.
void SetLogLevel(config::LogLevel level);

// Printable ASCII and valid UTF-8 stay; everything else becomes \n, \t or \xNN.
std::string Escaped(absl::string_view text);
// The inside of a JSON string.
std::string JsonEscaped(absl::string_view text);

}  // namespace fp8kvd::ops
