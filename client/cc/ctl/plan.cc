// fp8kvctl plan: whether fp8_kv pays for a model: from its config.json, without a daemon, or from
// what a daemon really serves.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "client/cc/ctl/commands.h"
#include "client/cc/ctl/gpus.h"
#include "client/cc/ctl/handles.h"
#include "client/cc/ctl/output.h"
#include "client/cc/ctl/plan_map.h"
#include "client/cc/ctl/plan_question.h"

namespace fp8kvd::ctl {
namespace {

constexpr int kCalls = 51;

// Unknown is not zero: JSON's word for it is null.
double OrNull(const std::optional<double>& value) { return value.value_or(std::nan("")); }

std::string PlanJson(const Question& question, const config::PrecisionDecision& d) {
  Json json;
  json.BeginObject().Key("batch").Count(static_cast<uint64_t>(d.batch));
  json.Key("tokens").Count(static_cast<uint64_t>(d.tokens));
  json.Key("kv_bytes").Number(d.kv_bytes).Key("other_bytes").Number(OrNull(d.other_bytes));
  json.Key("cache_share").Number(d.cache_share).Key("r").Number(d.ratio);
  json.Key("r_source").Text(config::RatioSourceName(d.ratio_source));
  json.Key("attention_speedup").Number(d.attention_speedup);
  json.Key("predicted_speedup").Number(d.predicted_speedup);
  json.Key("speedup_with_calls").Number(OrNull(d.speedup_with_calls));
  json.Key("gpu").Text(question.gpu).Key("gpu_gb").Number(question.gpu_bytes / 1e9);
  json.Key("read_gb_s").Number(OrNull(d.read_bytes_per_s) / 1e9);
  json.Key("rpc_us").Number(OrNull(d.rpc_us));
  json.Key("weight_bytes").Number(OrNull(question.WeightBytes()));
  json.Key("seqs_fit_bf16").Number(OrNull(question.SeqsThatFit(d, d.kv_bytes)));
  json.Key("seqs_fit_fp8_kv").Number(OrNull(question.SeqsThatFit(d, d.kv_bytes_fp8_kv)));
  const std::optional<int64_t> crossover = question.Crossover(d.batch);
  json.Key("fp8_kv_from_tokens");
  json.Number(crossover.has_value() ? static_cast<double>(*crossover) : std::nan(""));
  json.Key("precision").Text(config::PrecisionName(d.precision));
  json.Key("reason").Text(d.reason).EndObject();
  return json.str();
}

std::string Times(double factor) { return absl::StrCat(Fixed(factor, 2), "x"); }
std::string Gigabytes(double bytes) { return absl::StrFormat("%.2f GB", bytes * 1e-9); }

// Of the sequences asked for; empty where they fit either way, or nothing is known.
std::string WhetherAllFit(const Question& question, const config::PrecisionDecision& d) {
  const std::optional<double> bf16 = question.SeqsThatFit(d, d.kv_bytes);
  const std::optional<double> fp8_kv = question.SeqsThatFit(d, d.kv_bytes_fp8_kv);
  const auto batch = static_cast<double>(d.batch);
  if (!bf16.has_value() || !fp8_kv.has_value() || *bf16 >= batch) return "";
  return absl::StrCat(" (your ", d.batch, " fit ",
                      *fp8_kv >= batch ? "only in fp8_kv)" : "in neither)");
}

void PrintNumbers(const Question& question, const config::PrecisionDecision& d, std::ostream& out) {
  Table table({"of a step", ""});
  table.Add({"cache, bf16", Gigabytes(d.kv_bytes)});
  table.Add({"cache, fp8_kv", Gigabytes(d.kv_bytes_fp8_kv)});
  const std::optional<double> weights = question.WeightBytes();
  table.Add({"weights", weights.has_value() ? Gigabytes(*weights) : "unknown"});
  table.Add({"all that is read besides the cache",
             d.other_bytes.has_value() ? Gigabytes(*d.other_bytes) : "unknown"});
  table.Add({"cache share", absl::StrCat(Fixed(100 * d.cache_share, 1), " %")});
  table.Add({"r, fp8_kv / bf16 time of attention",
             absl::StrCat(Fixed(d.ratio, 3), " (", config::RatioSourceName(d.ratio_source), ")")});
  table.Add({"speed-up of attention alone", Times(d.attention_speedup)});
  table.Add({"speed-up of the step", Times(d.predicted_speedup)});
  table.Add(
      {d.rpc_us.has_value()
           ? absl::StrFormat("speed-up of the step with a call of %.4g us a layer", *d.rpc_us)
           : "speed-up of the step with a call a layer",
       d.speedup_with_calls.has_value() ? Times(*d.speedup_with_calls) : "unknown (--rpc_us)"});
  const auto fit = [&](double bytes) {
    const std::optional<double> seqs = question.SeqsThatFit(d, bytes);
    return seqs.has_value() ? absl::StrFormat("%.0f", *seqs) : std::string("unknown");
  };
  table.Add({absl::StrFormat("sequences beside the weights in %.4g GB (%s)",
                             question.gpu_bytes * 1e-9, question.gpu),
             absl::StrCat(fit(d.kv_bytes), " bf16, ", fit(d.kv_bytes_fp8_kv), " fp8_kv",
                          WhetherAllFit(question, d))});
  table.Print(out);
}

absl::Status PrintAnswer(const Invocation& invocation, const Question& question,
                         const config::PrecisionDecision& d) {
  const absl::StatusOr<PlanMap> map = MakePlanMap(question);
  if (!map.ok()) return map.status();
  const std::string path = invocation.Text("svg", "");
  if (!path.empty() && !(std::ofstream(path) << PlanMapSvg(*map, question)).flush()) {
    return absl::UnavailableError(absl::StrCat("cannot write ", path, "; name a file that may be"));
  }
  std::ostream& out = invocation.out();
  if (invocation.json()) {
    out << PlanJson(question, d) << '\n';
    return absl::OkStatus();
  }
  const ModelGeometry& g = question.geometry;
  out << Printable(question.model.model_type) << ": " << g.layers << " layers, " << g.q_heads
      << " q_heads, " << g.kv_heads << " kv_heads, head_dim " << g.head_dim << "; " << d.batch
      << " sequences of " << d.tokens << " tokens\n\n";
  PrintNumbers(question, d, out);
  PrintPlanMap(*map, out);
  out << "\nprecision: " << config::PrecisionName(d.precision) << "\n" << d.reason << '\n';
  return absl::OkStatus();
}

// The median of calls that do next to nothing: what a layer's call costs from here.
absl::StatusOr<double> MeasureCallUs(client::Client& client) {
  std::vector<double> times_us;
  for (int call = 0; call < kCalls; ++call) {
    const auto begin = std::chrono::steady_clock::now();
    const absl::StatusOr<client::ServerInfo> info = client.GetServerInfo();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    if (!info.ok()) return info.status();
    times_us.push_back(took.count());
  }
  return Quantile(times_us, 0.5);
}

std::string LiveJson(const client::PrecisionPlan& plan) {
  Json json;
  json.BeginObject().Key("batch").Count(plan.batch).Key("tokens").Count(plan.tokens);
  json.Key("kv_bytes").Number(plan.kv_bytes).Key("other_bytes").Number(plan.other_bytes);
  json.Key("cache_share").Number(plan.cache_share).Key("r").Number(plan.r);
  json.Key("r_source").Text(plan.r_source);
  json.Key("attention_speedup").Number(plan.attention_speedup);
  json.Key("predicted_speedup").Number(plan.predicted_speedup);
  json.Key("speedup_with_calls").Number(OrNull(plan.speedup_with_calls));
  json.Key("rpc_us").Number(OrNull(plan.rpc_us));
  json.Key("precision").Text(PrecisionName(plan.precision)).Key("reason").Text(plan.reason);
  json.Key("live");
  if (!plan.live.has_value()) return json.Number(std::nan("")).EndObject().str();
  const client::LiveLoad& live = *plan.live;
  json.BeginObject().Key("seconds").Number(live.seconds).Key("steps").Number(live.steps);
  json.Key("batch").Number(live.batch).Key("tokens").Number(live.tokens);
  json.Key("cache_share").Number(live.cache_share);
  json.Key("predicted_speedup").Number(live.predicted_speedup);
  json.Key("precision").Text(PrecisionName(live.precision));
  json.Key("contradicts").Bool(live.contradicts).Key("hint").Text(live.hint).EndObject();
  return json.EndObject().str();
}

void PrintLive(const client::PrecisionPlan& plan, std::ostream& out) {
  const bool served = plan.live.has_value();
  const client::LiveLoad live = plan.live.value_or(client::LiveLoad{});
  const auto of_live = [&](const std::string& text) { return served ? text : std::string("-"); };
  Table table({"", "configured", "served"});
  table.Add({"sequences in a step", absl::StrCat(plan.batch), of_live(Fixed(live.batch, 1))});
  table.Add({"tokens of each", absl::StrCat(plan.tokens), of_live(Fixed(live.tokens, 0))});
  table.Add({"cache share", absl::StrCat(Fixed(100 * plan.cache_share, 1), " %"),
             of_live(absl::StrCat(Fixed(100 * live.cache_share, 1), " %"))});
  table.Add({"speed-up of the step by fp8_kv", Times(plan.predicted_speedup),
             of_live(Times(live.predicted_speedup))});
  table.Add({"precision", PrecisionName(plan.precision), of_live(PrecisionName(live.precision))});
  table.Print(out);
  out << '\n' << Printable(plan.reason) << '\n';
  if (!served) {
    out << "\nno whole step of this model was served yet\n";
  } else if (live.contradicts) {
    out << "\nhint: " << Printable(live.hint) << '\n';
  } else {
    out << absl::StrFormat("\nthe load of the last %.3g s agrees with the configuration\n",
                           live.seconds);
  }
}

absl::Status RunLive(const Invocation& invocation) {
  const absl::StatusOr<double> rpc_us = invocation.Number("rpc_us", 0, 0, 1e6);
  if (!rpc_us.ok()) return rpc_us.status();
  absl::StatusOr<std::unique_ptr<client::Client>> client = invocation.Connect();
  if (!client.ok()) return client.status();
  const absl::StatusOr<double> call_us =
      invocation.Has("rpc_us") ? rpc_us : MeasureCallUs(**client);
  if (!call_us.ok()) return call_us.status();
  const absl::StatusOr<client::PrecisionPlan> plan =
      (*client)->PlanPrecision({.model = invocation.Text("model", ""), .rpc_us = *call_us});
  if (!plan.ok()) return plan.status();
  if (invocation.json()) {
    invocation.out() << LiveJson(*plan) << '\n';
  } else {
    PrintLive(*plan, invocation.out());
  }
  return absl::OkStatus();
}

absl::Status RunPlan(const Invocation& invocation) {
  if (invocation.Has("live")) return RunLive(invocation);
  absl::StatusOr<Question> question = AskQuestion(invocation);
  if (!question.ok()) return question.status();
  absl::StatusOr<config::PrecisionDecision> decision =
      question->Decide(question->batch, question->tokens);
  if (!decision.ok()) return decision.status();
  return PrintAnswer(invocation, *question, *decision);
}

}  // namespace

const Command& PlanCommand() {
  static const std::string gpus =
      absl::StrCat("the engine's device: ", GpuNames(), "; default the calibrated one, else h200");
  static const Command command = {
      "plan",
      "whether fp8_kv pays for a model: from its config.json, or by what a daemon serves (--live)",
      "",
      "fp8kvctl plan --hf_config=config.json --batch=32 --tokens=8192 --allow_fp8_kv",
      {{"hf_config", "FILE", "the model's config.json, as on Hugging Face; needs no daemon"},
       {"batch", "N", "sequences in a step; default 16"},
       {"tokens", "N", "of each; default 4096"},
       {"weight_bytes", "N", "all that a step reads besides the cache; default from config.json"},
       {"allow_fp8_kv", "", "let the answer be fp8_kv, as the daemon's flag of that name does"},
       {"bf16_layers", "LIST", "layers that stay bf16, as 0,5-17/6; default none"},
       {"calibration", "FILE", "what fp8kvd --calibrate measured: gives r at each context"},
       {"ratio", "R", "r where none is calibrated; default the ratio of the bytes"},
       {"rpc_us", "T", "cost of each layer's call; default as calibrated, or measured (--live)"},
       {"gpu", "NAME", gpus.c_str()},
       {"gpu_gb", "N", "memory for weights and sequences; default that of --gpu"},
       {"read_gb_s", "N", "what the device reads; default as calibrated, else that of --gpu"},
       {"svg", "FILE", "also draw the map there"},
       {"live", "", "of a daemon's model: the configured load beside what was really served"},
       {"model", "NAME", "with --live: which; default the only one"}},
      RunPlan};
  return command;
}

}  // namespace fp8kvd::ctl
