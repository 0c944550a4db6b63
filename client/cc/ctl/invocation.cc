#include "client/cc/ctl/invocation.h"

#include <algorithm>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "client/cc/ctl/files.h"
#include "config/suggest.h"

namespace fp8kvd::ctl {
namespace {

constexpr char kUsagePayload[] = "fp8kvctl/usage";
constexpr int64_t kTimeoutMsMax = 3'600'000;

std::optional<FlagSpec> Find(const std::vector<FlagSpec>& flags, const std::string& name) {
  for (const FlagSpec& flag : flags) {
    if (name == flag.name) return flag;
  }
  return std::nullopt;
}

std::string UnknownFlag(const std::vector<FlagSpec>& flags, const std::string& name) {
  std::vector<std::string> known;
  known.reserve(flags.size());
  for (const FlagSpec& flag : flags) known.emplace_back(flag.name);
  const std::string nearest = config::NearestWord(name, known);
  return absl::StrCat("unknown flag --", name, nearest.empty() ? "" : "; did you mean --", nearest,
                      nearest.empty() ? "" : "?");
}

bool IsFlag(const std::string& word) { return word.size() >= 2 && word[0] == '-'; }

}  // namespace

absl::Status UsageError(const std::string& message) {
  absl::Status status = absl::InvalidArgumentError(message);
  status.SetPayload(kUsagePayload, absl::Cord(""));
  return status;
}

int ToExitCode(const absl::Status& status) {
  if (status.ok()) return kExitOk;
  if (status.GetPayload(kUsagePayload).has_value()) return kExitUsage;
  const bool unanswered = status.code() == absl::StatusCode::kUnavailable ||
                          status.code() == absl::StatusCode::kDeadlineExceeded;
  return unanswered ? kExitUnreachable : kExitFailed;
}

absl::StatusOr<Invocation> Invocation::Parse(const Command& command,
                                             const std::vector<std::string>& words,
                                             std::ostream& out, std::ostream& progress) {
  Invocation result;
  result.out_ = &out;
  result.progress_ = &progress;
  const std::vector<FlagSpec> flags = FlagsOf(command);
  bool flags_ended = false;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (flags_ended || !IsFlag(word)) {
      result.arguments_.push_back(word);
      continue;
    }
    if (word == "--") {
      flags_ended = true;
      continue;
    }
    const size_t equals = word.find('=');
    const std::string name =
        word == "-h" ? "help" : word.substr(std::min<size_t>(2, word.size()), equals - 2);
    const std::optional<FlagSpec> flag = Find(flags, name);
    if (!flag.has_value() || (word[1] != '-' && word != "-h")) {
      return UsageError(
          absl::StrCat(UnknownFlag(flags, name), " See: fp8kvctl ", command.name, " --help"));
    }
    const bool is_switch = *flag->value == '\0';
    if (is_switch && equals != std::string::npos) {
      return UsageError(absl::StrCat("--", name, " takes no value; give it alone or leave it out"));
    }
    if (!is_switch && equals == std::string::npos && i + 1 == words.size()) {
      return UsageError(absl::StrCat("--", name, " wants a value: --", name, "=", flag->value));
    }
    const std::string value = equals != std::string::npos ? word.substr(equals + 1)
                              : is_switch                 ? ""
                                                          : words[++i];
    if (!result.flags_.emplace(name, value).second) {
      return UsageError(absl::StrCat("--", name, " is given twice; give it once"));
    }
  }
  if (*command.arguments == '\0' && !result.arguments_.empty()) {
    return UsageError(absl::StrCat("unexpected argument ", result.arguments_[0], "; fp8kvctl ",
                                   command.name, " takes only flags"));
  }
  return result;
}

std::string Invocation::Text(const std::string& flag, const std::string& absent) const {
  const auto found = flags_.find(flag);
  return found == flags_.end() ? absent : found->second;
}

absl::StatusOr<int64_t> Invocation::Count(const std::string& flag, int64_t absent, int64_t min,
                                          int64_t max) const {
  const auto found = flags_.find(flag);
  if (found == flags_.end()) return absent;
  int64_t count = 0;
  if (!absl::SimpleAtoi(found->second, &count) || count < min || count > max) {
    return UsageError(absl::StrCat("--", flag, " is ", found->second,
                                   ", wanted a whole number from ", min, " to ", max));
  }
  return count;
}

absl::StatusOr<double> Invocation::Number(const std::string& flag, double absent, double min,
                                          double max) const {
  const auto found = flags_.find(flag);
  if (found == flags_.end()) return absent;
  double number = 0;
  if (!absl::SimpleAtod(found->second, &number) || !(number >= min && number <= max)) {
    return UsageError(absl::StrCat("--", flag, " is ", found->second, ", wanted a number from ",
                                   min, " to ", max));
  }
  return number;
}

absl::Status Invocation::ReadSecurity(client::Options* options) const {
  constexpr uint64_t kPemBytesMax = 1 << 20;
  constexpr uint64_t kTokenBytesMax = 4096;
  client::TlsOptions tls;
  std::string token;
  struct File {
    const char* flag;
    uint64_t bytes_max;
    std::string* text;
  };
  const File files[] = {{"tls_ca", kPemBytesMax, &tls.root_certificates},
                        {"tls_cert", kPemBytesMax, &tls.certificate_chain},
                        {"tls_key", kPemBytesMax, &tls.private_key},
                        {"token_file", kTokenBytesMax, &token}};
  for (const File& file : files) {
    if (!Has(file.flag)) continue;
    absl::StatusOr<std::string> text = ReadFile(Text(file.flag, ""), file.bytes_max);
    if (!text.ok()) {
      return UsageError(absl::StrCat("--", file.flag, ": ", text.status().message()));
    }
    *file.text = *std::move(text);
  }
  if (Has("tls") || Has("tls_ca") || Has("tls_cert") || Has("tls_key")) options->tls = tls;
  options->token = std::string(absl::StripAsciiWhitespace(token));
  if (Has("token_file") && options->token.empty()) {
    return UsageError("--token_file is empty; it holds the token and nothing else");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<client::Client>> Invocation::Connect() const {
  client::Options options;
  options.target = Text("target", options.target);
  if (options.target.empty()) return UsageError("--target is empty, wanted host:port");
  absl::StatusOr<int64_t> timeout_ms = Count("timeout_ms", options.timeout_ms, 1, kTimeoutMsMax);
  if (!timeout_ms.ok()) return timeout_ms.status();
  options.timeout_ms = *timeout_ms;
  if (absl::Status status = ReadSecurity(&options); !status.ok()) return status;
  return client::Client::Connect(options);
}

std::vector<FlagSpec> SharedFlags(bool has_daemon) {
  std::vector<FlagSpec> flags;
  if (has_daemon) {
    flags.push_back({"target", "HOST:PORT", "the daemon; default 127.0.0.1:50051"});
    flags.push_back({"tls", "", "speak TLS; so do the three that follow"});
    flags.push_back({"tls_ca", "FILE", "PEM of the daemon's authorities; default: the system's"});
    flags.push_back({"tls_cert", "FILE", "PEM of our own certificate, if the daemon asks for one"});
    flags.push_back({"tls_key", "FILE", "PEM of its private key"});
    flags.push_back({"token_file", "FILE", "the token that says which tenant we are"});
    flags.push_back({"timeout_ms", "N", "of each call to it, retries included; default 30000"});
  }
  flags.push_back({"json", "", "print one JSON value instead of a table"});
  flags.push_back({"help", "", "print this"});
  return flags;
}

std::vector<FlagSpec> FlagsOf(const Command& command) {
  std::vector<FlagSpec> flags = command.flags;
  const std::vector<FlagSpec> shared = SharedFlags(command.has_daemon);
  flags.insert(flags.end(), shared.begin(), shared.end());
  return flags;
}

absl::StatusOr<size_t> CountFlagsBeforeCommand(const std::vector<std::string>& words) {
  const std::vector<FlagSpec> flags = SharedFlags(/*has_daemon=*/true);
  size_t at = 0;
  while (at < words.size() && IsFlag(words[at])) {
    const std::string& word = words[at];
    const size_t equals = word.find('=');
    const std::string name = word == "-h" ? "help" : word.substr(2, equals - 2);
    const std::optional<FlagSpec> flag = Find(flags, name);
    if (!flag.has_value() || (word[1] != '-' && word != "-h")) {
      return UsageError(absl::StrCat(UnknownFlag(flags, name),
                                     " A command's own flags stand behind it. See: fp8kvctl "
                                     "--help"));
    }
    at += *flag->value == '\0' || equals != std::string::npos ? 1 : 2;
  }
  return std::min(at, words.size());
}

std::string HelpOf(const Command& command) {
  std::string text = absl::StrCat("usage: fp8kvctl ", command.name, " [FLAGS]",
                                  *command.arguments == '\0' ? "" : " ", command.arguments, "\n\n",
                                  command.summary, "\n\nflags:\n");
  for (const FlagSpec& flag : FlagsOf(command)) {
    const std::string form =
        absl::StrCat("--", flag.name, *flag.value == '\0' ? "" : "=", flag.value);
    absl::StrAppendFormat(&text, "  %-24s %s\n", form, flag.text);
  }
  absl::StrAppend(&text, "\nexample:\n  ", command.example, "\n\n",
                  "exit codes: 0 done; 1 failed, or the accuracy contract does not hold; 2 wrong "
                  "usage;\n            3 the daemon cannot be reached or did not answer in time\n");
  return text;
}

}  // namespace fp8kvd::ctl
