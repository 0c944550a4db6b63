#include "config/command_line.h"

#include <algorithm>
#include <optional>
#include <set>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

#include "config/keys.h"
#include "config/suggest.h"

namespace fp8kvd::config {
namespace {

absl::Status Invalid(const std::string& text) { return absl::InvalidArgumentError(text); }

}  // namespace

absl::StatusOr<CommandLine> ParseCommandLine(absl::Span<const char* const> args) {
  CommandLine command_line;
  std::vector<std::string> known = {"config", "check_config", "calibrate", "help", "version"};
  for (const Key<Options>& key : Keys()) known.emplace_back(key.name);
  std::set<std::string> seen;
  for (const absl::string_view arg : args) {
    absl::string_view name = arg;
    if (!absl::ConsumePrefix(&name, "--")) {
      return Invalid(
          absl::StrCat("\"", absl::CEscape(arg), "\" is no flag; write --key=value, see --help"));
    }
    std::optional<std::string> value;
    if (const size_t equals = name.find('='); equals != name.npos) {
      value = std::string(name.substr(equals + 1));
      name = name.substr(0, equals);
    }
    const Key<Options>* key = FindKey(name);
    const std::string shown = absl::CEscape(arg.substr(0, 2 + name.size()));
    if (std::find(known.begin(), known.end(), std::string(name)) == known.end()) {
      const std::string near = NearestWord(name, known);
      return Invalid(absl::StrCat(
          "unknown flag ", shown,
          near.empty() ? "; --help lists all" : absl::StrCat("; did you mean --", near, "?")));
    }
    if (!seen.insert(std::string(name)).second) {
      return Invalid(absl::StrCat(shown, " is given twice; keep one"));
    }
    if (key != nullptr && !value.has_value() && KindOf(*key) == ValueKind::kBool) value = "true";
    if ((key != nullptr || name == "config") != value.has_value()) {
      return Invalid(absl::StrCat(shown, value.has_value() ? " takes no value; write it alone"
                                                           : " lacks its value; write "
                                                             "--key=value with an equals sign"));
    }
    if (key != nullptr) command_line.flags.emplace_back(std::string(name), *value);
    if (name == "config") command_line.config_path = *value;
    if (name == "help") command_line.action = CommandLine::Action::kHelp;
    if (name == "version") command_line.action = CommandLine::Action::kVersion;
    if (name == "check_config" && command_line.action == CommandLine::Action::kRun) {
      command_line.action = CommandLine::Action::kCheckConfig;
    }
    if (name == "calibrate" && command_line.action == CommandLine::Action::kRun) {
      command_line.action = CommandLine::Action::kCalibrate;
    }
  }
  return command_line;
}

}  // namespace fp8kvd::config
