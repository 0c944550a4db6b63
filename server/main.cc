// fp8kvd: the daemon. Flags, environment and file are config's; what runs is daemon's.
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "config/keys.h"
#include "config/load.h"
#include "config/model.h"
#include "config/report.h"
#include "server/daemon.h"
#include "server/version.h"

extern char** environ;

namespace fp8kvd {
namespace {

int Refuse(const absl::Status& status) {
  std::fprintf(stderr, "fp8kvd: %s\n", std::string(status.message()).c_str());
  return kExitUsage;
}

int Main(int argc, char** argv) {
  const absl::StatusOr<config::CommandLine> command_line =
      config::ParseCommandLine(absl::MakeConstSpan(argv + 1, argc > 0 ? argc - 1 : 0));
  if (!command_line.ok()) return Refuse(command_line.status());
  using Action = config::CommandLine::Action;
  if (command_line->action == Action::kHelp) {
    std::fputs(config::HelpText().c_str(), stdout);
    std::printf(
        "\nexit codes: %d drained after SIGTERM or SIGINT, %d could not start, %d wrong flags or\n"
        "            configuration, %d the device failed, %d drained, but the sequences were not\n"
        "            saved in snapshot_dir\n",
        kExitDrained, kExitNotStarted, kExitUsage, kExitDeviceFailed, kExitNotSaved);
    return 0;
  }
  if (command_line->action == Action::kVersion) {
    std::printf("fp8kvd %s\n", kVersion);
    return 0;
  }
  std::vector<std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) environment.emplace_back(*entry);
  absl::StatusOr<config::Loaded> loaded = config::Load(*command_line, environment);
  if (!loaded.ok()) return Refuse(loaded.status());
  if (command_line->action == Action::kCheckConfig) {
    const absl::StatusOr<std::string> report =
        config::CheckReport(*loaded, /*bytes_free=*/0, config::PlainBlockBytes);
    if (!report.ok()) return Refuse(report.status());
    std::fputs(report->c_str(), stdout);
    return 0;
  }
  if (command_line->action == Action::kCalibrate) return RunCalibration(*loaded);
  return RunDaemon(*std::move(loaded), [&] { return config::Load(*command_line, environment); });
}

}  // namespace
}  // namespace fp8kvd

int main(int argc, char** argv) { return fp8kvd::Main(argc, argv); }
