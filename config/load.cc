#include "config/load.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

#include "config/device_list.h"
#include "config/hf_config.h"
#include "config/json.h"
#include "config/keys.h"
#include "config/model.h"
#include "config/security.h"
#include "config/suggest.h"
#include "config/textproto.h"

namespace fp8kvd::config {
namespace {

constexpr absl::string_view kEnvPrefix = "FP8KVD_";
constexpr absl::string_view kConfigEnv = "FP8KVD_CONFIG";

absl::Status At(absl::string_view place, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(place, ": ", status.message()));
}

// "line 3: …" of a parser to "FILE:3: …".
absl::Status AtLine(absl::string_view file, const absl::Status& status) {
  absl::string_view message = status.message();
  const bool has_line = absl::ConsumePrefix(&message, "line ");
  return absl::Status(status.code(), absl::StrCat(file, has_line ? ":" : ": ", message));
}

absl::Status ApplyEnvironment(absl::Span<const std::string> environment, Loaded* loaded) {
  std::vector<std::string> known;
  for (const Key<Options>& key : Keys()) known.emplace_back(key.name);
  for (const std::string& entry : environment) {
    const size_t equals = entry.find('=');
    const absl::string_view name = absl::string_view(entry).substr(0, equals);
    if (equals == entry.npos || !absl::StartsWith(name, kEnvPrefix) || name == kConfigEnv) continue;
    const std::string key_name = absl::AsciiStrToLower(absl::StripPrefix(name, kEnvPrefix));
    const Key<Options>* key = FindKey(key_name);
    if (key == nullptr || EnvName(*key) != name) {
      // Not refused: Kubernetes sets FP8KVD_PORT and the like for a service named fp8kvd.
      const std::string near = NearestWord(key_name, known);
      loaded->warnings.push_back(absl::StrCat(
          "environment: ", absl::CEscape(name), " is no key of ours and was ignored",
          near.empty() ? "" : absl::StrCat("; did you mean ", EnvName(*FindKey(near)), "?")));
      continue;
    }
    const absl::Status status =
        SetValue(*key, absl::string_view(entry).substr(equals + 1), loaded->options);
    if (!status.ok()) return At(name, status);
    loaded->sources[PathOf(*key)] = std::string(name);
  }
  return absl::OkStatus();
}

absl::Status ApplyFlags(const CommandLine& command_line, Loaded* loaded) {
  for (const auto& [name, value] : command_line.flags) {
    const Key<Options>* key = FindKey(name);
    const std::string flag = absl::StrCat("--", name);
    if (key == nullptr) return absl::InvalidArgumentError(absl::StrCat(flag, ": unknown flag"));
    const absl::Status status = SetValue(*key, value, loaded->options);
    if (!status.ok()) return At(flag, status);
    loaded->sources[PathOf(*key)] = flag;
  }
  return absl::OkStatus();
}

bool HasShape(const ModelOptions& m) {
  return m.layers != 0 || m.q_heads != 0 || m.kv_heads != 0 || m.head_dim != 0 || m.sm_scale != 0 ||
         m.window != 0 || m.softcap != 0 || m.has_sinks || !m.layer_rules.empty();
}

// The shape that hf_config names, put where a given shape would stand.
absl::Status ImportModel(const std::string& folder, ModelOptions* model) {
  if (HasShape(*model)) {
    return absl::InvalidArgumentError(
        "hf_config gives the whole shape, and layers, heads, window, softcap or "
        "layer_rules are given too; keep one of both");
  }
  const bool absolute = absl::StartsWith(model->hf_config, "/") || folder.empty();
  const std::string path =
      absolute ? model->hf_config : absl::StrCat(folder, "/", model->hf_config);
  const auto text = ReadFileBounded(path, kConfigBytesMax);
  if (!text.ok()) return text.status();
  const auto imported = ImportHfConfig(*text);
  if (!imported.ok()) return AtLine(model->hf_config, imported.status());
  ApplyHfModel(*imported, model);
  return absl::OkStatus();
}

absl::Status CheckTogether(const Options& options) {
  if (const auto devices = ParseDeviceList(options.engine.devices); !devices.ok()) {
    return devices.status();
  }
  if (options.cache.pool_bytes > 0 && options.cache.pool_fraction > 0) {
    return absl::InvalidArgumentError(
        "pool_bytes and pool_fraction are both set, one size is allowed; remove one");
  }
  if (options.cache.lease_ttl_ms > options.cache.lease_ttl_ms_max) {
    return absl::InvalidArgumentError(absl::StrCat(
        "lease_ttl_ms is ", options.cache.lease_ttl_ms, ", allowed is up to lease_ttl_ms_max ",
        options.cache.lease_ttl_ms_max, "; lower it or raise that"));
  }
  if (options.engine.staging_bytes < 2 * options.server.message_bytes_max) {
    return absl::InvalidArgumentError(absl::StrCat(
        "staging_bytes is ", options.engine.staging_bytes,
        ", allowed is from twice message_bytes_max, ", 2 * options.server.message_bytes_max,
        ", so that a message and its reply fit; raise it or lower that"));
  }
  if (options.server.transport_bytes_max < 4 * options.server.message_bytes_max) {
    return absl::InvalidArgumentError(absl::StrCat(
        "transport_bytes_max is ", options.server.transport_bytes_max,
        ", allowed is from four times message_bytes_max, ", 4 * options.server.message_bytes_max,
        ", so that messages fit beside each other; raise it or lower that"));
  }
  if (options.server.listen_address == options.server.http_address &&
      !absl::EndsWith(options.server.listen_address, ":0")) {
    return absl::InvalidArgumentError(absl::StrCat("listen_address and http_address are both ",
                                                   options.server.listen_address,
                                                   ", one server per port is allowed; change one"));
  }
  int64_t expected_seqs = 0;
  for (const ModelOptions& model : options.models) {
    expected_seqs += model.expected_seqs;
    if (model.expected_tokens > options.cache.seq_len_max) {
      return absl::InvalidArgumentError(
          absl::StrCat("model \"", model.name, "\": expected_tokens is ", model.expected_tokens,
                       ", allowed is up to seq_len_max ", options.cache.seq_len_max,
                       "; lower it or raise that"));
    }
  }
  if (expected_seqs > options.cache.seqs_max) {
    return absl::InvalidArgumentError(
        absl::StrCat("seqs_max is ", options.cache.seqs_max, ", the models' expected_seqs are ",
                     expected_seqs, "; raise seqs_max or lower those"));
  }
  return absl::OkStatus();
}

// The calibration, if the policy names one that is there: before the first --calibrate it is not.
absl::Status ReadCalibration(Loaded* loaded) {
  const std::string& path = loaded->options.policy.calibration_file;
  if (path.empty()) return absl::OkStatus();
  const absl::StatusOr<std::string> json = ReadFileBounded(path, kConfigBytesMax);
  if (absl::IsNotFound(json.status())) {
    loaded->warnings.push_back(
        absl::StrCat("calibration_file ", json.status().message(),
                     "; fp8kvd --calibrate makes it; until then r is not measured"));
    return absl::OkStatus();
  }
  if (!json.ok()) return json.status();
  absl::StatusOr<Calibration> calibration = ParseCalibration(*json);
  if (!calibration.ok()) return AtLine(absl::CEscape(path), calibration.status());
  loaded->calibration = *std::move(calibration);
  return absl::OkStatus();
}

// Decides for every model, by the calibration where there is one.
absl::Status PlanModels(Loaded* loaded) {
  const Calibration* const calibration =
      loaded->calibration.has_value() ? &*loaded->calibration : nullptr;
  loaded->models.clear();
  for (const ModelOptions& model : loaded->options.models) {
    absl::StatusOr<PlannedModel> planned = PlanModel(model, loaded->options.policy, calibration);
    if (!planned.ok()) return planned.status();
    loaded->models.push_back(*std::move(planned));
  }
  return absl::OkStatus();
}

absl::Status FinishModels(const std::string& folder, Loaded* loaded) {
  Options& options = loaded->options;
  if (options.models.empty()) {
    return absl::InvalidArgumentError(
        "no model is configured, 1 to 64 are allowed; add models { name: … } to the "
        "configuration, as deploy/example.textproto does");
  }
  std::set<std::string> names;
  for (ModelOptions& model : options.models) {
    if (model.name.empty()) {
      return absl::InvalidArgumentError(
          "a model has no name, allowed are 1 to 128 letters, digits, '.', '_', '-' and "
          "'/'; give each model a name");
    }
    if (!names.insert(model.name).second) {
      return absl::InvalidArgumentError(absl::StrCat(
          "model \"", model.name, "\" is configured twice; give each model its own name"));
    }
    if (!model.hf_config.empty()) {
      const absl::Status status = ImportModel(folder, &model);
      if (!status.ok()) return At(absl::StrCat("model \"", model.name, "\""), status);
    }
  }
  absl::Status status = ReadCalibration(loaded);
  if (status.ok()) status = PlanModels(loaded);
  return status.ok() ? CheckTogether(options) : status;
}

// Whether the pools can be made, as far as that is known without a device.
absl::Status CheckPools(const Loaded& loaded) {
  if (loaded.options.cache.pool_fraction > 0) return absl::OkStatus();
  std::vector<ModelGeometry> geometries;
  for (const PlannedModel& model : loaded.models) geometries.push_back(model.geometry);
  const int32_t devices = DevicesNamed(loaded.options.engine);
  std::vector<ModelOptions> models;
  for (const ModelOptions& model : loaded.options.models) models.push_back(OnOneOf(devices, model));
  return PlanPools(geometries, models, OnOneOf(devices, loaded.options.cache), /*bytes_free=*/0,
                   PlainBlockBytes)
      .status();
}

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == path.npos ? "" : path.substr(0, std::max<size_t>(slash, 1));
}

}  // namespace

absl::Status DropForeignCalibration(absl::string_view version, absl::string_view device_name,
                                    Loaded* loaded) {
  if (!loaded->calibration.has_value()) return absl::OkStatus();
  const Calibration& calibration = *loaded->calibration;
  if (calibration.Fits(version, device_name)) return absl::OkStatus();
  loaded->warnings.push_back(absl::StrCat(
      "calibration_file ", absl::CEscape(loaded->options.policy.calibration_file), " is of fp8kvd ",
      absl::CEscape(calibration.version), " on ", absl::CEscape(calibration.device_name),
      ", this is ", version, " on ", device_name, "; it is not used, run fp8kvd --calibrate here"));
  loaded->calibration.reset();
  return PlanModels(loaded);
}

absl::StatusOr<std::string> ReadFileBounded(const std::string& path, int64_t bytes_max) {
  const auto unreadable = [&](const std::string& why) {
    return absl::NotFoundError(absl::StrCat(absl::CEscape(path), ": cannot be read (", why,
                                            "); check the path and its permissions"));
  };
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {  // a pipe could keep us waiting
    return unreadable(error ? error.message() : "not a regular file");
  }
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::string bytes(bytes_max + 1, '\0');
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file.is_open() || file.bad()) return unreadable(std::generic_category().message(errno));
  bytes.resize(file.gcount());
  if (static_cast<int64_t>(bytes.size()) > bytes_max) {
    return absl::InvalidArgumentError(
        absl::StrCat(absl::CEscape(path), ": larger than the ", bytes_max,
                     " bytes that are allowed; is it the right file?"));
  }
  return bytes;
}

absl::StatusOr<Loaded> LoadText(absl::string_view text, Format format, const std::string& name,
                                const std::string& folder, const CommandLine& command_line,
                                absl::Span<const std::string> environment) {
  Loaded loaded;
  if (static_cast<int64_t>(text.size()) > kConfigBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": ", text.size(), " bytes, allowed are ", kConfigBytesMax));
  }
  const auto tree = format == Format::kJson ? ParseJson(text) : ParseTextproto(text);
  if (!tree.ok()) return AtLine(name, tree.status());
  absl::Status status = ReadTree(*tree, name, &loaded.options, &loaded.sources);
  if (status.ok()) status = ApplyEnvironment(environment, &loaded);
  if (status.ok()) status = ApplyFlags(command_line, &loaded);
  if (status.ok()) status = FinishModels(folder, &loaded);
  if (status.ok()) status = FinishSecurity(&loaded.options);
  if (status.ok()) status = CheckPools(loaded);
  if (!status.ok()) return status;
  for (std::string& door : OpenDoors(loaded.options)) loaded.warnings.push_back(std::move(door));
  return loaded;
}

absl::StatusOr<Loaded> Load(const CommandLine& command_line,
                            absl::Span<const std::string> environment) {
  std::string path = command_line.config_path;
  for (const std::string& entry : environment) {
    if (path.empty() && absl::StartsWith(entry, absl::StrCat(kConfigEnv, "="))) {
      path = entry.substr(kConfigEnv.size() + 1);
    }
  }
  if (path.empty()) {
    return absl::InvalidArgumentError(
        "no configuration is given; start with --config=FILE or set FP8KVD_CONFIG, "
        "deploy/example.textproto is one");
  }
  const bool json = absl::EndsWith(path, ".json");
  if (!json && !absl::EndsWith(path, ".textproto")) {
    return absl::InvalidArgumentError(
        absl::StrCat(absl::CEscape(path),
                     ": the name tells no format, allowed are .textproto and .json; "
                     "rename it"));
  }
  const auto text = ReadFileBounded(path, kConfigBytesMax);
  if (!text.ok()) return text.status();
  return LoadText(*text, json ? Format::kJson : Format::kTextproto, path, FolderOf(path),
                  command_line, environment);
}

}  // namespace fp8kvd::config
