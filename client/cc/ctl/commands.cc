#include "client/cc/ctl/commands.h"

#include "absl/strings/str_format.h"

#include "client/cc/ctl/output.h"

namespace fp8kvd::ctl {
namespace {

std::string Overview() {
  std::string text =
      "usage: fp8kvctl [--target=HOST:PORT] [--json] COMMAND [FLAGS] [ARGUMENTS]\n\n"
      "Talks to fp8kvd, the decode-attention daemon.\n\ncommands:\n";
  for (const Command* command : Commands()) {
    absl::StrAppendFormat(&text, "  %-8s %s\n", command->name, command->summary);
  }
  return text +
         "\nfp8kvctl COMMAND --help shows flags and an example.\n"
         "exit codes: 0 done; 1 failed, or the accuracy contract does not hold; 2 wrong usage;\n"
         "            3 the daemon cannot be reached or did not answer in time\n";
}

const Command* Find(const std::string& name) {
  for (const Command* command : Commands()) {
    if (name == command->name) return command;
  }
  return nullptr;
}

absl::Status Run(const Command& command, const std::vector<std::string>& words, std::ostream& out,
                 std::ostream& err) {
  absl::StatusOr<Invocation> invocation = Invocation::Parse(command, words, out, err);
  if (!invocation.ok()) return invocation.status();
  if (invocation->help()) {
    out << HelpOf(command);
    return absl::OkStatus();
  }
  return command.run(*invocation);
}

}  // namespace

std::vector<const Command*> Commands() {
  return {&InfoCommand(), &PlanCommand(),   &AccuracyCommand(), &StatCommand(),
          &TopCommand(),  &ReplayCommand(), &BenchCommand(),    &FreeCommand()};
}

int RunCommandLine(const std::vector<std::string>& words, std::ostream& out, std::ostream& err) {
  const absl::StatusOr<size_t> flags = CountFlagsBeforeCommand(words);
  if (!flags.ok()) {
    err << "fp8kvctl: " << Printable(flags.status().message()) << '\n';
    return ToExitCode(flags.status());
  }
  std::vector<std::string> rest(words.begin(), words.begin() + static_cast<int64_t>(*flags));
  const auto begins_with = [&words](const char* word) {
    return !words.empty() && words[0] == word;
  };
  const bool asks_help =
      begins_with("--help") || begins_with("-h") || (begins_with("help") && words.size() == 1);
  if (*flags == words.size() || asks_help) {
    (asks_help ? out : err) << Overview();
    return asks_help ? kExitOk : kExitUsage;
  }
  const bool help_of = begins_with("help");
  const size_t command_at = help_of ? 1 : *flags;
  const std::string& name = words[command_at];
  const Command* command = Find(name);
  if (command == nullptr) {
    err << "fp8kvctl: unknown command " << Printable(name) << "\n\n" << Overview();
    return kExitUsage;
  }
  if (help_of) {
    out << HelpOf(*command);
    return kExitOk;
  }
  rest.insert(rest.end(), words.begin() + static_cast<int64_t>(command_at) + 1, words.end());
  const absl::Status status = Run(*command, rest, out, err);
  out.flush();
  if (!status.ok()) err << "fp8kvctl " << name << ": " << Printable(status.message()) << '\n';
  return ToExitCode(status);
}

}  // namespace fp8kvd::ctl
