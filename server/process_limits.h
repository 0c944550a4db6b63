// server/process_limits.h: what the kernel lets this process have. Open files are raised as far as
// allowed, since each connection is one; the rest is told in the log.
//
// Core files stay as the operator set them. One holds the K and V of everybody: the unit and the
// chart of deploy/ turn them off.
#pragma once

#include <string>

namespace fp8kvd {

// Raises the soft limit of open files to the hard one. Gives a line for the log.
std::string SetProcessLimits();

}  // namespace fp8kvd
