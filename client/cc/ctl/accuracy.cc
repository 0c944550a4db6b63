// fp8kvctl accuracy: what fp8_kv does to captured attention, computed here or by a daemon.
#include "client/cc/ctl/accuracy.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "client/cc/ctl/commands.h"
#include "client/cc/ctl/output.h"
#include "client/cc/ctl/replay.h"

namespace fp8kvd::ctl {
namespace {

using kernels::reference::Accuracy;
using kernels::reference::AttentionRows;
using kernels::reference::kWays;
using kernels::reference::RowsProfile;
using kernels::reference::Way;
using kernels::reference::WayError;
using kernels::reference::WayName;

void AddProfile(const char* name, const RowsProfile& profile, Json& json) {
  json.Key(name).BeginObject().Key("amax").Number(profile.amax);
  json.Key("amax_over_rms").Number(profile.amax_over_rms);
  json.Key("channel_amax_ratio").Number(profile.channel_amax_ratio);
  json.Key("subnormal").Number(profile.subnormal).Key("outlier_rows").BeginArray();
  for (const kernels::reference::OutlierRow& row : profile.worst) {
    json.BeginObject().Key("token").Count(static_cast<uint64_t>(row.token));
    json.Key("kv_head").Count(static_cast<uint64_t>(row.kv_head));
    json.Key("error").Number(row.error).Key("amax").Number(row.amax).EndObject();
  }
  json.EndArray().EndObject();
}

void AddKernel(const std::optional<KernelCheck>& checked, Json& json) {
  json.Key("kernel");
  if (!checked.has_value()) {
    json.Number(std::nan(""));  // null
    return;
  }
  const KernelCheck& kernel = *checked;
  json.BeginObject().Key("pairs").Count(static_cast<uint64_t>(kernel.pairs));
  json.Key("rel_l2_fp32").Number(kernel.rel_l2_fp32).Key("rel_l2_bf16").Number(kernel.rel_l2_bf16);
  json.Key("worst_element").Number(kernel.worst_element);
  json.Key("control_v_scale_x1.05").Number(kernel.control_v_scale);
  json.Key("control_one_scale").Number(kernel.control_one_scale);
  json.Key("controls_refused").Bool(kernel.controls_refused).Key("held").Bool(kernel.held);
  json.EndObject();
}

void AddLayer(const LayerAccuracy& layer, Json& json) {
  const Accuracy& accuracy = layer.accuracy;
  json.BeginObject().Key("capture").Text(layer.file).Key("model").Text(layer.capture.model);
  json.Key("layer").Count(static_cast<uint64_t>(layer.capture.layer));
  json.Key("op").Number(layer.op()).Key("near_lossless").Bool(layer.near_lossless());
  json.Key("expected_op").Number(layer.expected_op.value_or(std::nan("")));
  json.Key("held").Bool(layer.held()).Key("ways").BeginObject();
  for (int way = 0; way < kWays; ++way) {
    const WayError& error = accuracy.ways[way];
    json.Key(WayName(static_cast<Way>(way))).BeginObject().Key("op").Number(error.op);
    json.Key("op_worst_row").Number(error.op_worst_row);
    json.Key("k").Number(error.k).Key("v").Number(error.v);
    json.Key("saturated").Number(error.saturated).Key("subnormal").Number(error.subnormal);
    json.EndObject();
  }
  json.EndObject();
  AddProfile("k", accuracy.k, json);
  AddProfile("v", accuracy.v, json);
  json.Key("score_spread").Number(accuracy.score_spread);
  json.Key("effective_keys").Number(accuracy.effective_keys);
  AddKernel(layer.kernel, json);
  json.EndObject();
}

std::string AccuracyJson(const std::vector<LayerAccuracy>& layers, bool held) {
  Json json;
  json.BeginObject().Key("contract_held").Bool(held).Key("layers").BeginArray();
  for (const LayerAccuracy& layer : layers) AddLayer(layer, json);
  return json.EndArray().EndObject().str();
}

std::string Error(double error) { return absl::StrFormat("%.4f", error); }

void PrintTables(const std::vector<LayerAccuracy>& layers, std::ostream& out) {
  out << "error of the attention output, relative L2 against bf16 K and V\n";
  Table ways({"capture", "fp8_kv", "K alone", "V alone", "per head", "per tensor", "scale 1.0",
              "transformers", "expected", "near-lossless"});
  for (const LayerAccuracy& layer : layers) {
    const auto op = [&](Way way) { return Error(layer.accuracy.of(way).op); };
    ways.Add({Printable(layer.file), op(Way::kRow), op(Way::kRowKOnly), op(Way::kRowVOnly),
              op(Way::kHead), op(Way::kTensor), op(Way::kUnit), op(Way::kTransformers),
              layer.expected_op.has_value() ? Error(*layer.expected_op) : "-",
              layer.near_lossless() ? "yes" : "NO"});
  }
  ways.Print(out);
  out << "\nwhere it comes from\n";
  Table rows({"capture", "K error", "V error", "K subnormal", "V subnormal", "tensor: clipped",
              "K channel outlier", "score spread", "keys averaged", "worst K row"});
  for (const LayerAccuracy& layer : layers) {
    const Accuracy& a = layer.accuracy;
    const WayError& row = a.of(Way::kRow);
    rows.Add({Printable(layer.file), Error(row.k), Error(row.v), Percent(a.k.subnormal),
              Percent(a.v.subnormal), Percent(a.of(Way::kTensor).saturated),
              absl::StrFormat("%.1fx", a.k.channel_amax_ratio), Fixed(a.score_spread, 2),
              Fixed(a.effective_keys, 1),
              a.k.worst.empty()
                  ? "-"
                  : absl::StrFormat("%.3f (token %d)", a.k.worst[0].error, a.k.worst[0].token)});
  }
  rows.Print(out);
}

void PrintKernel(const std::vector<LayerAccuracy>& layers, std::ostream& out) {
  out << "\nthe CPU kernel against double precision on the same codes and scales\n";
  Table kernel({"capture", "pairs", "fp32 out", "bf16 out", "worst element", "V scale x 1.05",
                "one scale for all", "controls refused", "held"});
  for (const LayerAccuracy& layer : layers) {
    const KernelCheck& k = *layer.kernel;
    kernel.Add({Printable(layer.file), absl::StrCat(k.pairs),
                absl::StrFormat("%.1e", k.rel_l2_fp32), absl::StrFormat("%.1e", k.rel_l2_bf16),
                Percent(k.worst_element), absl::StrFormat("%.3f", k.control_v_scale),
                absl::StrFormat("%.3f", k.control_one_scale), k.controls_refused ? "yes" : "NO",
                k.held ? "yes" : "NO"});
  }
  kernel.Print(out);
}

AttentionRows RowsOf(Capture& capture) {
  return {.k = std::move(capture.k),
          .v = std::move(capture.v),
          .q = std::move(capture.q),
          .positions = capture.positions,
          .kv_heads = capture.kv_heads,
          .group = capture.q_heads / capture.kv_heads,
          .head_dim = capture.head_dim,
          .window = capture.window,
          .sm_scale = capture.sm_scale,
          .softcap = capture.softcap};
}

// Numbers of a daemon as those of this process.
absl::StatusOr<Accuracy> FromDaemon(const client::Accuracy& from) {
  const auto profile = [](const client::RowsProfile& rows) {
    RowsProfile out{.amax = rows.amax,
                    .amax_over_rms = rows.amax_over_rms,
                    .channel_amax_ratio = rows.channel_amax_ratio,
                    .subnormal = rows.subnormal,
                    .worst = {}};
    for (const client::OutlierRow& row : rows.worst) {
      out.worst.push_back({static_cast<int32_t>(row.token), static_cast<int32_t>(row.kv_head),
                           row.error, row.amax});
    }
    return out;
  };
  Accuracy to;
  to.k = profile(from.k);
  to.v = profile(from.v);
  to.score_spread = from.score_spread;
  to.effective_keys = from.effective_keys;
  for (int way = 0; way < kWays; ++way) {
    const char* const name = WayName(static_cast<Way>(way));
    const auto found = std::find_if(from.ways.begin(), from.ways.end(),
                                    [name](const client::WayError& e) { return e.way == name; });
    if (found == from.ways.end()) {
      return absl::UnimplementedError(absl::StrCat("the daemon does not measure the way ", name,
                                                   "; it is of another version than fp8kvctl"));
    }
    to.ways[way] = {found->op, found->op_worst_row, found->k,
                    found->v,  found->saturated,    found->subnormal};
  }
  return to;
}

absl::StatusOr<Accuracy> MeasureRemotely(const AttentionRows& rows, client::Client& daemon) {
  const absl::StatusOr<client::Accuracy> accuracy =
      daemon.MeasureAccuracy({.kv_heads = static_cast<uint32_t>(rows.kv_heads),
                              .head_dim = static_cast<uint32_t>(rows.head_dim),
                              .k = rows.k,
                              .v = rows.v,
                              .q_heads = static_cast<uint32_t>(rows.kv_heads * rows.group),
                              .q = rows.q,
                              .positions = rows.positions,
                              .sm_scale = rows.sm_scale,
                              .window = static_cast<uint32_t>(rows.window),
                              .softcap = rows.softcap});
  if (!accuracy.ok()) return accuracy.status();
  return FromDaemon(*accuracy);
}

absl::Status Measure(const AttentionRows& rows, client::Client* daemon, LayerAccuracy* layer) {
  if (daemon != nullptr) {
    const absl::StatusOr<Accuracy> accuracy = MeasureRemotely(rows, *daemon);
    if (accuracy.ok()) layer->accuracy = *accuracy;
    return accuracy.status();
  }
  const absl::StatusOr<KernelCheck> kernel = CheckKernel(rows);
  if (!kernel.ok()) return kernel.status();
  layer->kernel = *kernel;
  layer->accuracy = kernels::reference::MeasureAccuracy(rows);
  return absl::OkStatus();
}

void PrintAnswer(const std::vector<LayerAccuracy>& layers, bool remote, bool held,
                 std::ostream& out) {
  PrintTables(layers, out);
  if (!remote) PrintKernel(layers, out);
  const auto near_lossless =
      std::count_if(layers.begin(), layers.end(),
                    [](const LayerAccuracy& layer) { return layer.near_lossless(); });
  out << "\nfp8_kv is near-lossless on " << near_lossless << " of " << layers.size()
      << " captures\n";
  if (remote) {
    out << "the daemon's kernels were not checked: fp8kvctl replay does that\n";
  } else {
    out << "the kernel's accuracy contract " << (held ? "held" : "BROKEN") << '\n';
  }
}

std::string WhyNot(const std::vector<LayerAccuracy>& layers) {
  std::string why;
  for (const LayerAccuracy& layer : layers) {
    if (layer.kernel.has_value() && !layer.kernel->held) {
      absl::StrAppend(&why, layer.file, ": ", layer.kernel->why, "; ");
    }
    if (layer.as_expected()) continue;
    absl::StrAppend(&why, layer.file, ": the error is ", Error(layer.op()), ", expected is ",
                    Error(*layer.expected_op), " within 2 %; ");
  }
  return why;
}

absl::Status RunAccuracy(const Invocation& invocation) {
  if (invocation.arguments().empty()) {
    return UsageError("name at least one capture, for example tests/data/captures/*.safetensors");
  }
  if (invocation.Has("target") && !invocation.Has("remote")) {
    return UsageError("--target names a daemon, which measures nothing here; add --remote");
  }
  std::unique_ptr<client::Client> daemon;
  if (invocation.Has("remote")) {
    absl::StatusOr<std::unique_ptr<client::Client>> client = invocation.Connect();
    if (!client.ok()) return client.status();
    daemon = *std::move(client);
  }
  std::vector<LayerAccuracy> layers;
  for (const std::string& path : invocation.arguments()) {
    absl::StatusOr<LayerAccuracy> layer =
        MeasureCapture(path, invocation.Text("errors", ""), daemon.get());
    if (!layer.ok()) return layer.status();
    layers.push_back(*std::move(layer));
  }
  const std::string html = invocation.Text("html", "");
  if (!html.empty() && !(std::ofstream(html) << AccuracyHtml(layers)).flush()) {
    return absl::UnavailableError(absl::StrCat("cannot write ", html, "; name a file that may be"));
  }
  const bool held = std::all_of(layers.begin(), layers.end(),
                                [](const LayerAccuracy& layer) { return layer.held(); });
  if (invocation.json()) {
    invocation.out() << AccuracyJson(layers, held) << '\n';
  } else {
    PrintAnswer(layers, daemon != nullptr, held, invocation.out());
  }
  return held ? absl::OkStatus() : absl::FailedPreconditionError(WhyNot(layers));
}

}  // namespace

std::string Percent(double share) { return absl::StrFormat("%.2f %%", 100 * share); }

bool LayerAccuracy::as_expected() const {
  return !expected_op.has_value() ||
         std::fabs(op() - *expected_op) <= kFp8ErrorTolerance * *expected_op;
}

absl::StatusOr<LayerAccuracy> MeasureCapture(const std::string& path,
                                             const std::string& errors_path,
                                             client::Client* daemon) {
  absl::StatusOr<Capture> capture = ReadCapture(path);
  if (!capture.ok()) return capture.status();
  if (capture->q_heads % capture->kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": q_heads is ", capture->q_heads,
                                                   ", wanted a multiple of kv_heads ",
                                                   capture->kv_heads, "; capture all heads"));
  }
  LayerAccuracy layer;
  layer.file = path.substr(path.rfind('/') + 1);
  if (absl::Status status = Measure(RowsOf(*capture), daemon, &layer); !status.ok()) {
    return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
  }
  const std::string errors = errors_path.empty() ? ErrorsPath(path) : errors_path;
  if (!errors_path.empty() || std::filesystem::exists(errors)) {
    absl::StatusOr<double> expected = ReadExpectedError(errors, capture->layer);
    if (!expected.ok()) return expected.status();
    layer.expected_op = *expected;
  }
  capture->out.clear();
  layer.capture = *std::move(capture);
  return layer;
}

const Command& AccuracyCommand() {
  static const Command command = {
      "accuracy",
      "what fp8_kv does to captured attention, beside other ways to keep K and V in 8 bits",
      "FILE...",
      "fp8kvctl accuracy tests/data/captures/*.safetensors --html=report.html",
      {{"html", "FILE", "also write a report with plots there"},
       {"errors", "FILE", "expected errors; default NAME_errors.json beside the capture, if there"},
       {"remote", "", "let the daemon measure, at --target; default: this program, without one"}},
      RunAccuracy};
  return command;
}

}  // namespace fp8kvd::ctl
