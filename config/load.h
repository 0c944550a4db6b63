// config/load.h: from a command line, an environment and a file to checked Options. Flags win over
// FP8KVD_* variables, those over the file, the file over the defaults of options.h.
//
// Promises: what comes out is within every range of keys.cc, names at least one model, and every
//   model has a shape that kernels serve and a decided precision. Whatever goes in is bounded by
//   kConfigBytesMax and ends in a value or a Status.
// Does not manage: files other than the configuration, its hf_config files and its
//   calibration_file; the device.
// Errors: INVALID_ARGUMENT "FILE:LINE: …", "--flag: …", "VARIABLE: …" or "model "x": …" with what
//   was asked, what is allowed and what to do; NOT_FOUND for a file that cannot be read.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "config/cache_share.h"
#include "config/calibration.h"
#include "config/command_line.h"
#include "config/options.h"
#include "config/read_tree.h"

namespace fp8kvd::config {

// A configuration or a config.json of a model; a larger file is a mistake.
inline constexpr int64_t kConfigBytesMax = int64_t{1} << 20;

// A configuration brought to an end.
struct Loaded {
  Options options;                         // hf_config imported
  std::optional<Calibration> calibration;  // of policy.calibration_file, where there is one
  std::vector<PlannedModel> models;        // as options.models
  Sources sources;                         // of every key that somebody set
  std::vector<std::string> warnings;       // for the log
};

// Takes a calibration out that is of another device or version than these, and decides anew without
// it; a warning says so.
absl::Status DropForeignCalibration(absl::string_view version, absl::string_view device_name,
                                    Loaded* loaded);

// environment: "NAME=value" as in environ.
absl::StatusOr<Loaded> Load(const CommandLine& command_line,
                            absl::Span<const std::string> environment);

enum class Format : uint8_t { kTextproto, kJson };

// A whole configuration from the text of a file. `name` stands in errors; `folder` is where
// relative hf_config paths start.
absl::StatusOr<Loaded> LoadText(absl::string_view text, Format format, const std::string& name,
                                const std::string& folder, const CommandLine& command_line,
                                absl::Span<const std::string> environment);

// A file's bytes. NOT_FOUND if it cannot be read, INVALID_ARGUMENT if it is larger than bytes_max.
absl::StatusOr<std::string> ReadFileBounded(const std::string& path, int64_t bytes_max);

}  // namespace fp8kvd::config
