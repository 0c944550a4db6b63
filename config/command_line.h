// config/command_line.h: the flags of fp8kvd, read and named, not yet valued: load.h does that.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace fp8kvd::config {

// What the command line asks for.
struct CommandLine {
  enum class Action : uint8_t { kRun, kCheckConfig, kCalibrate, kHelp, kVersion };

  Action action = Action::kRun;
  std::string config_path;                                 // empty: FP8KVD_CONFIG
  std::vector<std::pair<std::string, std::string>> flags;  // key, value
};

// args: without the program's name. Refuses unknown flags, a flag given twice and anything that is
// no flag.
absl::StatusOr<CommandLine> ParseCommandLine(absl::Span<const char* const> args);

}  // namespace fp8kvd::config
