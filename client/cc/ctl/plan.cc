// fp8kvctl plan: whether fp8_kv pays for a model, from its config.json alone; needs no daemon.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

#include "client/cc/ctl/commands.h"
#include "client/cc/ctl/files.h"
#include "client/cc/ctl/output.h"
#include "config/cache_share.h"
#include "config/hf_config.h"
#include "config/load.h"
#include "config/model.h"

namespace fp8kvd::ctl {
namespace {

constexpr int64_t kBatchMax = int64_t{1} << 20;
constexpr double kBytesMax = 1e18;
constexpr double kRpcUsMax = 1e6;

struct Question {
  config::HfModel model;
  ModelGeometry geometry;  // as if fp8_kv had been chosen
  int64_t batch = 0;
  int64_t tokens = 0;
  std::optional<double> weight_bytes;  // given: the whole of other_bytes
  config::PolicyOptions policy;

  std::optional<double> OtherBytes(int64_t of_batch) const {
    if (weight_bytes.has_value() || !model.weights.known) return weight_bytes;
    return model.weights.BytesPerStep(of_batch);
  }

  absl::StatusOr<config::PrecisionDecision> Decide(int64_t of_batch, int64_t of_tokens) const {
    return config::DecidePrecision(geometry, config::PrecisionChoice::kAuto,
                                   {of_batch, of_tokens, OtherBytes(of_batch)}, policy);
  }
};

absl::StatusOr<Question> Ask(const Invocation& invocation) {
  const std::string path = invocation.Text("hf_config", "");
  if (path.empty()) {
    return UsageError("--hf_config is missing: the config.json of a Hugging Face model");
  }
  Question question;
  absl::StatusOr<int64_t> batch = invocation.Count("batch", 16, 1, kBatchMax);
  if (!batch.ok()) return batch.status();
  absl::StatusOr<int64_t> tokens = invocation.Count("tokens", 4096, 1, kSeqLenMax);
  if (!tokens.ok()) return tokens.status();
  absl::StatusOr<double> ratio = invocation.Number("ratio", 0, 0.01, 10);
  if (!ratio.ok()) return ratio.status();
  absl::StatusOr<double> weight_bytes = invocation.Number("weight_bytes", 0, 0, kBytesMax);
  if (!weight_bytes.ok()) return weight_bytes.status();
  question.batch = *batch;
  question.tokens = *tokens;
  if (invocation.Has("weight_bytes")) question.weight_bytes = *weight_bytes;
  question.policy.allow_fp8_kv = invocation.Has("allow_fp8_kv");
  question.policy.fp8_bf16_ratio = *ratio;
  absl::StatusOr<std::string> json = ReadFile(path, config::kConfigBytesMax);
  if (!json.ok()) return json.status();
  absl::StatusOr<config::HfModel> model = config::ImportHfConfig(*json);
  if (!model.ok()) {
    return absl::Status(model.status().code(), absl::StrCat(path, ": ", model.status().message()));
  }
  question.model = *std::move(model);
  question.model.shape.name = question.model.model_type;
  absl::StatusOr<ModelGeometry> geometry =
      config::MakeGeometry(question.model.shape, Precision::kFp8Kv);
  if (!geometry.ok()) return geometry.status();
  question.geometry = *std::move(geometry);
  return question;
}

std::string PlanJson(const config::PrecisionDecision& d) {
  Json json;
  json.BeginObject().Key("batch").Count(static_cast<uint64_t>(d.batch));
  json.Key("tokens").Count(static_cast<uint64_t>(d.tokens));
  json.Key("kv_bytes").Number(d.kv_bytes).Key("other_bytes");
  // Unknown is not zero: JSON's word for it is null.
  json.Number(d.other_bytes.value_or(std::nan("")));
  json.Key("cache_share").Number(d.cache_share).Key("r").Number(d.ratio);
  json.Key("r_source").Text(config::RatioSourceName(d.ratio_source));
  json.Key("attention_speedup").Number(d.attention_speedup);
  json.Key("predicted_speedup").Number(d.predicted_speedup);
  json.Key("precision").Text(config::PrecisionName(d.precision));
  json.Key("reason").Text(d.reason).EndObject();
  return json.str();
}

std::string Short(int64_t count) {
  if (count >= 1024 && count % 1024 == 0) return absl::StrCat(count / 1024, "k");
  return absl::StrCat(count);
}

// Darker is faster; the steps are those of a step's speed-up, 1.0 to 2.0.
const char* Shade(double speedup) {
  if (speedup < 1.10) return " ";
  if (speedup < 1.25) return "░";
  if (speedup < 1.40) return "▒";
  if (speedup < 1.60) return "▓";
  return "█";
}

absl::Status PrintMap(const Question& question, std::ostream& out) {
  constexpr int64_t kBatches[] = {1, 2, 4, 8, 16, 32, 64, 128, 256};
  constexpr int64_t kContexts[] = {256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072};
  std::vector<std::string> head = {"batch \\ tokens"};
  for (const int64_t tokens : kContexts) head.push_back(Short(tokens));
  head.emplace_back("fp8_kv from");
  Table table(std::move(head));
  for (const int64_t batch : kBatches) {
    std::vector<std::string> row = {absl::StrCat(batch)};
    for (const int64_t tokens : kContexts) {
      absl::StatusOr<config::PrecisionDecision> d = question.Decide(batch, tokens);
      if (!d.ok()) return d.status();
      row.push_back(absl::StrCat(Fixed(d->predicted_speedup, 2), Shade(d->predicted_speedup)));
    }
    const std::optional<double> other_bytes = question.OtherBytes(batch);
    const std::optional<int64_t> crossover =
        other_bytes.has_value() ? config::CrossoverTokens(question.geometry, batch, *other_bytes,
                                                          question.policy.cache_share_min)
                                : std::nullopt;
    row.push_back(crossover.has_value() ? absl::StrCat(*crossover, " tokens") : "-");
    table.Add(std::move(row));
  }
  out << "\npredicted speed-up of a step by fp8_kv ( <1.10  ░<1.25  ▒<1.40  ▓<1.60  █ more)\n";
  table.Print(out);
  return absl::OkStatus();
}

std::string Times(double factor) { return absl::StrCat(Fixed(factor, 2), "x"); }

absl::Status PrintAnswer(const Invocation& invocation, const Question& question,
                         const config::PrecisionDecision& d) {
  absl::StatusOr<double> rpc_us = invocation.Number("rpc_us", 0, 0, kRpcUsMax);
  if (!rpc_us.ok()) return rpc_us.status();
  absl::StatusOr<double> read_gb_s = invocation.Number("read_gb_s", 4590, 1e-3, 1e6);
  if (!read_gb_s.ok()) return read_gb_s.status();
  absl::StatusOr<double> gpu_gb = invocation.Number("gpu_gb", 0, 1e-3, 1e6);
  if (!gpu_gb.ok()) return gpu_gb.status();

  std::ostream& out = invocation.out();
  const ModelGeometry& g = question.geometry;
  out << Printable(question.model.model_type) << ": " << g.layers << " layers, " << g.q_heads
      << " q_heads, " << g.kv_heads << " kv_heads, head_dim " << g.head_dim << "; " << d.batch
      << " sequences of " << d.tokens << " tokens\n\n";
  Table table({"of a bf16 step", ""});
  table.Add({"cache read", HumanBytes(d.kv_bytes)});
  table.Add({"all else read", d.other_bytes.has_value() ? HumanBytes(*d.other_bytes) : "unknown"});
  table.Add({"cache share", absl::StrCat(Fixed(100 * d.cache_share, 1), " %")});
  table.Add({"r, fp8_kv / bf16 time of attention",
             absl::StrCat(Fixed(d.ratio, 3), " (", config::RatioSourceName(d.ratio_source), ")")});
  table.Add({"speed-up of attention alone", Times(d.attention_speedup)});
  table.Add({"speed-up of the step", Times(d.predicted_speedup)});
  const std::optional<double> with_calls =
      config::SpeedupWithCalls(d, g.layers, *rpc_us, *read_gb_s * 1e9);
  if (invocation.Has("rpc_us") && with_calls.has_value()) {
    table.Add(
        {absl::StrCat("speed-up with a call of ", *rpc_us, " us a layer"), Times(*with_calls)});
  }
  if (invocation.Has("gpu_gb") && question.model.weights.known) {
    const double room = std::max(0.0, *gpu_gb * 1e9 - question.model.weights.TotalBytes());
    const auto fit = [&](double bytes) { return std::floor(room / (bytes / d.batch)); };
    table.Add({absl::StrCat("sequences beside the weights in ", *gpu_gb, " GB"),
               absl::StrCat(fit(d.kv_bytes), " bf16, ", fit(d.kv_bytes_fp8_kv), " fp8_kv")});
  }
  table.Print(out);
  if (absl::Status status = PrintMap(question, out); !status.ok()) return status;
  out << "\nprecision: " << config::PrecisionName(d.precision) << "\n" << d.reason << '\n';
  return absl::OkStatus();
}

absl::Status RunPlan(const Invocation& invocation) {
  absl::StatusOr<Question> question = Ask(invocation);
  if (!question.ok()) return question.status();
  absl::StatusOr<config::PrecisionDecision> decision =
      question->Decide(question->batch, question->tokens);
  if (!decision.ok()) return decision.status();
  if (invocation.json()) {
    invocation.out() << PlanJson(*decision) << '\n';
    return absl::OkStatus();
  }
  return PrintAnswer(invocation, *question, *decision);
}

}  // namespace

const Command& PlanCommand() {
  static const Command command = {
      "plan",
      "whether fp8_kv pays for a model, from its config.json; needs no daemon",
      "",
      "fp8kvctl plan --hf_config=config.json --batch=32 --tokens=8192 --allow_fp8_kv",
      {{"hf_config", "FILE", "the model's config.json, as on Hugging Face"},
       {"batch", "N", "sequences in a step; default 16"},
       {"tokens", "N", "of each; default 4096"},
       {"weight_bytes", "N", "all that a step reads besides the cache; default from config.json"},
       {"allow_fp8_kv", "", "let the answer be fp8_kv, as the daemon's flag of that name does"},
       {"ratio", "R", "measured fp8_kv / bf16 time of attention; default the ratio of the bytes"},
       {"rpc_us", "T", "also show the speed-up when each layer costs a call of so long"},
       {"read_gb_s", "N", "with --rpc_us: what the device reads; default 4590, one H200"},
       {"gpu_gb", "N", "also show how many sequences fit beside the weights"}},
      RunPlan,
      /*has_daemon=*/false};
  return command;
}

}  // namespace fp8kvd::ctl
