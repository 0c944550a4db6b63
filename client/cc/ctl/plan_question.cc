#include "client/cc/ctl/plan_question.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/cc/ctl/files.h"
#include "client/cc/ctl/gpus.h"
#include "config/load.h"
#include "config/model.h"

namespace fp8kvd::ctl {
namespace {

constexpr int64_t kBatchMax = int64_t{1} << 20;
constexpr double kBytesMax = 1e18;
constexpr double kRpcUsMax = 1e6;
constexpr char kDefaultGpu[] = "h200";

// The engine's device: --gpu, else the one that was calibrated, else kDefaultGpu.
absl::StatusOr<Gpu> AskGpu(const Invocation& invocation, const Question& question) {
  const Gpu* calibrated = question.calibration.has_value()
                              ? FindGpuOfDevice(question.calibration->device_name)
                              : nullptr;
  const std::string name =
      invocation.Text("gpu", calibrated != nullptr ? calibrated->name : kDefaultGpu);
  const Gpu* const gpu = FindGpu(name);
  if (gpu != nullptr) return *gpu;
  return UsageError(absl::StrCat("--gpu is \"", name, "\", known are ", GpuNames(),
                                 "; give --gpu_gb and --read_gb_s of another"));
}

absl::Status ReadPolicy(const Invocation& invocation, Question* question) {
  config::PolicyOptions& policy = question->policy;
  policy.allow_fp8_kv = invocation.Has("allow_fp8_kv");
  const auto number = [&](const char* flag, double absent, double min, double max, double* to) {
    const absl::StatusOr<double> value = invocation.Number(flag, absent, min, max);
    if (value.ok()) *to = *value;
    return value.status();
  };
  absl::Status status = number("ratio", 0, 0.01, 10, &policy.fp8_bf16_ratio);
  status.Update(number("rpc_us", 0, 0, kRpcUsMax, &policy.rpc_us));
  const absl::StatusOr<Gpu> gpu = AskGpu(invocation, *question);
  if (!gpu.ok()) return gpu.status();
  // 0: what was calibrated, which is better known than a table.
  const bool measured = question->calibration.has_value() && !invocation.Has("gpu");
  status.Update(number("read_gb_s", measured ? 0 : gpu->read_gb_s, 1e-3, 1e6, &policy.read_gb_s));
  double gpu_gb = 0;
  status.Update(number("gpu_gb", gpu->memory_gb, 1e-3, 1e6, &gpu_gb));
  question->gpu = invocation.Has("gpu_gb") ? "given" : gpu->name;
  question->gpu_bytes = gpu_gb * 1e9;
  double weight_bytes = 0;
  status.Update(number("weight_bytes", 0, 0, kBytesMax, &weight_bytes));
  if (invocation.Has("weight_bytes")) question->weight_bytes = weight_bytes;
  return status;
}

absl::Status ReadCalibrationFile(const Invocation& invocation, Question* question) {
  const std::string path = invocation.Text("calibration", "");
  if (path.empty()) return absl::OkStatus();
  absl::StatusOr<std::string> json = ReadFile(path, config::kConfigBytesMax);
  if (!json.ok()) return json.status();
  absl::StatusOr<config::Calibration> calibration = config::ParseCalibration(*json);
  if (!calibration.ok()) {
    return absl::Status(calibration.status().code(),
                        absl::StrCat(path, ": ", calibration.status().message()));
  }
  question->calibration = *std::move(calibration);
  return absl::OkStatus();
}

absl::Status ReadModel(const Invocation& invocation, Question* question) {
  const std::string path = invocation.Text("hf_config", "");
  if (path.empty()) {
    return UsageError(
        "--hf_config is missing: the config.json of a Hugging Face model; or --live, for a model "
        "that a daemon serves");
  }
  absl::StatusOr<std::string> json = ReadFile(path, config::kConfigBytesMax);
  if (!json.ok()) return json.status();
  absl::StatusOr<config::HfModel> model = config::ImportHfConfig(*json);
  if (!model.ok()) {
    return absl::Status(model.status().code(), absl::StrCat(path, ": ", model.status().message()));
  }
  question->model = *std::move(model);
  question->model.shape.name = question->model.model_type;
  question->model.shape.bf16_layers = invocation.Text("bf16_layers", "");
  absl::StatusOr<ModelGeometry> geometry =
      config::MakeGeometry(question->model.shape, Precision::kFp8Kv);
  if (!geometry.ok()) return geometry.status();
  question->geometry = *std::move(geometry);
  return absl::OkStatus();
}

}  // namespace

std::optional<double> Question::OtherBytes(int64_t of_batch) const {
  if (weight_bytes.has_value() || !model.weights.known) return weight_bytes;
  return model.weights.BytesPerStep(of_batch);
}

absl::StatusOr<config::PrecisionDecision> Question::Decide(int64_t of_batch,
                                                           int64_t of_tokens) const {
  return config::DecidePrecision(geometry, config::PrecisionChoice::kAuto,
                                 {of_batch, of_tokens, OtherBytes(of_batch)}, policy,
                                 calibration.has_value() ? &*calibration : nullptr);
}

std::optional<int64_t> Question::Crossover(int64_t of_batch) const {
  const std::optional<double> other_bytes = OtherBytes(of_batch);
  if (!other_bytes.has_value()) return std::nullopt;
  const std::optional<int64_t> by_share =
      config::CrossoverTokens(geometry, of_batch, *other_bytes, policy.cache_share_min);
  if (!by_share.has_value()) return std::nullopt;
  // From there on r alone can still speak against it, and it changes slowly with the context.
  Question allowed = *this;
  allowed.policy.allow_fp8_kv = true;
  constexpr double kStep = 1.02;
  for (int64_t at = *by_share; at <= kSeqLenMax;
       at = std::max(at + 1, static_cast<int64_t>(static_cast<double>(at) * kStep))) {
    const absl::StatusOr<config::PrecisionDecision> decision = allowed.Decide(of_batch, at);
    if (decision.ok() && decision->precision == Precision::kFp8Kv) return at;
  }
  return std::nullopt;
}

std::optional<double> Question::WeightBytes() const {
  if (!model.weights.known) return std::nullopt;
  return model.weights.TotalBytes();
}

std::optional<double> Question::SeqsThatFit(const config::PrecisionDecision& decision,
                                            double kv_bytes) const {
  const std::optional<double> weights = WeightBytes();
  if (!weights.has_value() || kv_bytes <= 0) return std::nullopt;
  const double room = std::max(0.0, gpu_bytes - *weights);
  return std::floor(room / (kv_bytes / static_cast<double>(decision.batch)));
}

absl::StatusOr<Question> AskQuestion(const Invocation& invocation) {
  Question question;
  absl::StatusOr<int64_t> batch = invocation.Count("batch", 16, 1, kBatchMax);
  if (!batch.ok()) return batch.status();
  absl::StatusOr<int64_t> tokens = invocation.Count("tokens", 4096, 1, kSeqLenMax);
  if (!tokens.ok()) return tokens.status();
  question.batch = *batch;
  question.tokens = *tokens;
  absl::Status status = ReadCalibrationFile(invocation, &question);
  if (status.ok()) status = ReadPolicy(invocation, &question);
  if (status.ok()) status = ReadModel(invocation, &question);
  if (!status.ok()) return status;
  return question;
}

}  // namespace fp8kvd::ctl
