// client/cc/ctl/invocation.h: one run of fp8kvctl: its subcommand, flags and arguments, where it
// prints, and how a Status becomes an exit code.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "client/cc/client.h"

namespace fp8kvd::ctl {

enum ExitCode : int {
  kExitOk = 0,
  kExitFailed = 1,       // the operation failed, or the accuracy contract does not hold
  kExitUsage = 2,        // the command line is wrong; nothing was done
  kExitUnreachable = 3,  // the daemon cannot be reached, or did not answer in time
};

struct FlagSpec {
  const char* name;
  const char* value;  // what stands for its value in the help; empty: a switch
  const char* text;   // its effect and its default
};

class Invocation;

struct Command {
  const char* name;
  const char* summary;    // one line
  const char* arguments;  // as the usage line shows them; empty: none allowed
  const char* example;    // works when pasted, given a daemon
  std::vector<FlagSpec> flags;
  absl::Status (*run)(const Invocation&);
  bool has_daemon = true;  // it talks to one, so it takes the flags that say which
};

// A wrong command line: exit code 2.
absl::Status UsageError(const std::string& message);
int ToExitCode(const absl::Status& status);

class Invocation {
 public:
  // words: what follows the subcommand on the command line. Flags are --name=value, --name value,
  // or --name for a switch, anywhere; after "--" everything is an argument.
  static absl::StatusOr<Invocation> Parse(const Command& command,
                                          const std::vector<std::string>& words, std::ostream& out,
                                          std::ostream& progress);

  const std::vector<std::string>& arguments() const { return arguments_; }
  bool json() const { return Has("json"); }
  bool help() const { return Has("help"); }
  std::ostream& out() const { return *out_; }            // results
  std::ostream& progress() const { return *progress_; }  // what happens meanwhile, for people

  bool Has(const std::string& flag) const { return flags_.count(flag) > 0; }
  std::string Text(const std::string& flag, const std::string& absent) const;
  absl::StatusOr<int64_t> Count(const std::string& flag, int64_t absent, int64_t min,
                                int64_t max) const;
  absl::StatusOr<double> Number(const std::string& flag, double absent, double min,
                                double max) const;

  // A client for --target and the other flags that say how to reach it.
  absl::StatusOr<std::unique_ptr<client::Client>> Connect() const;

 private:
  absl::Status ReadSecurity(client::Options* options) const;

  std::map<std::string, std::string> flags_;
  std::vector<std::string> arguments_;
  std::ostream* out_ = nullptr;
  std::ostream* progress_ = nullptr;
};

// Those that commands share; they may stand before the command too.
std::vector<FlagSpec> SharedFlags(bool has_daemon);
// Its own flags, then the shared ones.
std::vector<FlagSpec> FlagsOf(const Command& command);
// How many words at the beginning are shared flags with their values: the next is the command.
absl::StatusOr<size_t> CountFlagsBeforeCommand(const std::vector<std::string>& words);
std::string HelpOf(const Command& command);

}  // namespace fp8kvd::ctl
