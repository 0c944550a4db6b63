// config/read_tree.h: a configuration file's tree into Options: every name known, every value of
// its type and in its range. Does not look at what belongs together: load.h.
#pragma once

#include <map>
#include <string>

#include "absl/status/status.h"

#include "config/options.h"
#include "config/tree.h"

namespace fp8kvd::config {

// Where a key's value is from: "server.poller_threads" -> "file", "--poller_threads", a variable.
using Sources = std::map<std::string, std::string>;

// `name` stands in errors: INVALID_ARGUMENT "NAME:LINE: …". Names may be written as protobuf's JSON
// writes them, batchRowsMax for batch_rows_max; null is the same as absent.
absl::Status ReadTree(const Tree& root, const std::string& name, Options* options,
                      Sources* sources);

}  // namespace fp8kvd::config
