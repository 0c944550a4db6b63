// fp8kvctl replay: captures through a daemon, a line for each and precision, and the verdict.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "client/cc/ctl/commands.h"
#include "client/cc/ctl/handles.h"
#include "client/cc/ctl/output.h"
#include "client/cc/ctl/replay.h"

namespace fp8kvd::ctl {
namespace {

constexpr int64_t kRoundsMax = 10'000;

struct Line {
  std::string file;
  int64_t tokens = 0;
  ReplayTarget target;
  double rel_l2 = 0;
  ErrorBounds allowed;
  uint64_t cache_bytes = 0;
  double p50_ms = 0;
  double p99_ms = 0;

  bool held() const { return rel_l2 >= allowed.min && rel_l2 <= allowed.max; }
};

absl::StatusOr<client::Precision> ChosenPrecision(const Invocation& invocation) {
  const std::string text = invocation.Text("precision", "both");
  if (text == "both") return client::Precision::kUnspecified;
  for (const client::Precision p : {client::Precision::kBf16, client::Precision::kFp8Kv}) {
    if (text == PrecisionName(p)) return p;
  }
  return UsageError(absl::StrCat("--precision is ", text, ", wanted bf16, fp8_kv or both"));
}

absl::StatusOr<double> ExpectedError(const Invocation& invocation, const std::string& path,
                                     const Capture& capture) {
  const std::string errors = invocation.Text("errors", ErrorsPath(path));
  if (errors.empty()) {
    return UsageError(
        absl::StrCat(path,
                     " does not end in _layerNN.safetensors, so the file with "
                     "the errors expected in fp8_kv is unknown; name it by --errors"));
  }
  return ReadExpectedError(errors, capture.layer);
}

absl::Status ReplayFile(const Invocation& invocation, client::Client& client,
                        const client::ServerInfo& info, const std::string& path, int64_t rounds,
                        std::vector<Line>& lines) {
  absl::StatusOr<client::Precision> precision = ChosenPrecision(invocation);
  if (!precision.ok()) return precision.status();
  absl::StatusOr<Capture> capture = ReadCapture(path);
  if (!capture.ok()) return capture.status();
  absl::StatusOr<std::vector<ReplayTarget>> targets =
      FindTargets(info, *capture, invocation.Text("model", ""), *precision);
  if (!targets.ok()) return targets.status();
  for (const ReplayTarget& target : *targets) {
    double expected = 0;
    if (target.precision != client::Precision::kBf16) {
      absl::StatusOr<double> read = ExpectedError(invocation, path, *capture);
      if (!read.ok()) return read.status();
      expected = *read;
    }
    if (!invocation.json()) {
      invocation.progress() << "replaying " << path << " in " << PrecisionName(target.precision)
                            << '\n';
    }
    absl::StatusOr<ReplayResult> result = Replay(client, *capture, target, rounds);
    if (!result.ok()) return result.status();
    lines.push_back({.file = path.substr(path.rfind('/') + 1),
                     .tokens = capture->tokens,
                     .target = target,
                     .rel_l2 = result->rel_l2,
                     .allowed = AllowedError(target.precision, expected),
                     .cache_bytes = result->cache_bytes,
                     .p50_ms = Quantile(result->call_ms, 0.5),
                     .p99_ms = Quantile(result->call_ms, 0.99)});
  }
  return absl::OkStatus();
}

std::string ReplayJson(const std::vector<Line>& lines, bool held) {
  Json json;
  json.BeginObject().Key("contract_held").Bool(held).Key("replays").BeginArray();
  for (const Line& line : lines) {
    json.BeginObject().Key("capture").Text(line.file);
    json.Key("tokens").Count(static_cast<uint64_t>(line.tokens));
    json.Key("model").Text(line.target.model).Key("layer").Count(line.target.layer);
    json.Key("precision").Text(PrecisionName(line.target.precision));
    json.Key("rel_l2").Number(line.rel_l2).Key("rel_l2_min").Number(line.allowed.min);
    json.Key("rel_l2_max").Number(line.allowed.max).Key("held").Bool(line.held());
    json.Key("cache_bytes").Count(line.cache_bytes);
    json.Key("cache_layers").Count(line.target.group_layers.size());
    json.Key("p50_ms").Number(line.p50_ms).Key("p99_ms").Number(line.p99_ms).EndObject();
  }
  return json.EndArray().EndObject().str();
}

void PrintTable(const std::vector<Line>& lines, std::ostream& out) {
  Table table({"capture", "tokens", "precision", "rel. L2", "allowed", "held", "cache", "layers",
               "p50 ms", "p99 ms"});
  for (const Line& line : lines) {
    table.Add({Printable(line.file), absl::StrCat(line.tokens),
               PrecisionName(line.target.precision), absl::StrFormat("%.5g", line.rel_l2),
               absl::StrCat(Fixed(line.allowed.min, 4), " to ", Fixed(line.allowed.max, 4)),
               line.held() ? "yes" : "NO", HumanBytes(static_cast<double>(line.cache_bytes)),
               absl::StrCat(line.target.group_layers.size()), Fixed(line.p50_ms, 2),
               Fixed(line.p99_ms, 2)});
  }
  table.Print(out);
}

absl::Status RunReplay(const Invocation& invocation) {
  if (invocation.arguments().empty()) {
    return UsageError("name at least one capture, for example tests/data/captures/*.safetensors");
  }
  absl::StatusOr<int64_t> rounds = invocation.Count("rounds", 4, 1, kRoundsMax);
  if (!rounds.ok()) return rounds.status();
  if (absl::Status s = ChosenPrecision(invocation).status(); !s.ok()) return s;
  absl::StatusOr<std::unique_ptr<client::Client>> client = invocation.Connect();
  if (!client.ok()) return client.status();
  absl::StatusOr<client::ServerInfo> info = (*client)->GetServerInfo();
  if (!info.ok()) return info.status();
  std::vector<Line> lines;
  for (const std::string& path : invocation.arguments()) {
    absl::Status status = ReplayFile(invocation, **client, *info, path, *rounds, lines);
    if (!status.ok()) return status;
  }
  const auto held = static_cast<size_t>(
      std::count_if(lines.begin(), lines.end(), [](const Line& line) { return line.held(); }));
  if (invocation.json()) {
    invocation.out() << ReplayJson(lines, held == lines.size()) << '\n';
  } else {
    PrintTable(lines, invocation.out());
    invocation.out() << "\naccuracy contract " << (held == lines.size() ? "held" : "BROKEN") << ": "
                     << held << " of " << lines.size() << " replays within their bounds\n";
  }
  return held == lines.size()
             ? absl::OkStatus()
             : absl::FailedPreconditionError("an output is outside of the accuracy contract");
}

}  // namespace

const Command& ReplayCommand() {
  static const Command command = {
      "replay",
      "sends captured attention through the daemon and checks the output: the accuracy contract",
      "FILE...",
      "fp8kvctl replay tests/data/captures/*.safetensors",
      {{"precision", "NAME", "bf16, fp8_kv or both; default both, as far as a model offers them"},
       {"model", "NAME", "only this model; default the first of the capture's shape"},
       {"errors", "FILE", "expected errors of fp8_kv; default NAME_errors.json beside the capture"},
       {"rounds", "N", "how often the steps are decoded, for the latencies; default 4"}},
      RunReplay};
  return command;
}

}  // namespace fp8kvd::ctl
