// client/cc/ctl/handles.h: handles and precisions as words of the command line.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "client/cc/types.h"

namespace fp8kvd::ctl {

// "seq_id.generation.incarnation.home", hexadecimal; made to be copied from one command to the
// next.
std::string HandleText(const client::Handle& handle);
absl::StatusOr<client::Handle> ParseHandle(const std::string& text);
absl::StatusOr<std::vector<client::Handle>> ParseHandles(const std::vector<std::string>& texts);

const char* PrecisionName(client::Precision precision);

}  // namespace fp8kvd::ctl
