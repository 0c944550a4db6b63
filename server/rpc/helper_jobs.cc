#include "server/rpc/helper_jobs.h"

#include <optional>

#include "absl/strings/str_cat.h"

#include "config/cache_share.h"
#include "config/hf_config.h"
#include "config/model.h"
#include "server/rpc/control_job.h"
#include "server/translate/requests.h"

namespace fp8kvd::rpc {
namespace {

constexpr int32_t kHelperRetryMs = 50;
constexpr size_t kHfConfigBytesMax = size_t{1} << 20;
constexpr size_t kPlanBytesMax = kHfConfigBytesMax + 4096;

template <typename... Parts>
absl::Status Invalid(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

absl::StatusOr<config::ModelOptions> ModelToPlan(const Parts& parts,
                                                 const v1::PlanPrecisionRequest& request) {
  if (request.subject_case() == v1::PlanPrecisionRequest::kHfConfigJson) {
    absl::StatusOr<config::HfModel> imported = config::ImportHfConfig(request.hf_config_json());
    if (!imported.ok()) {
      return Invalid("hf_config_json: ", imported.status().message(),
                     "; send a config.json as its model came with");
    }
    config::ModelOptions model;
    model.name = "described";
    if (request.batch() != 0) model.expected_seqs = static_cast<int32_t>(request.batch());
    config::ApplyHfModel(*imported, &model);
    return model;
  }
  const absl::StatusOr<int32_t> index = translate::FindModel(
      *parts.catalog, request.model(), static_cast<int64_t>(request.model().size()));
  if (!index.ok()) return index.status();
  return parts.planner->models[*index];
}

void SetNumbers(const config::PrecisionDecision& d, v1::PlanPrecisionResponse* response) {
  response->set_precision(translate::FromPrecision(d.precision));
  response->set_reason(d.reason);
  response->set_kv_bytes(d.kv_bytes);
  response->set_other_bytes(d.other_bytes.value_or(0));
  response->set_cache_share(d.cache_share);
  response->set_convertible_share(d.convertible_share);
  response->set_r(d.ratio);
  response->set_r_source(config::RatioSourceName(d.ratio_source));
  response->set_predicted_speedup(d.predicted_speedup);
  response->set_attention_speedup(d.attention_speedup);
  if (d.speedup_with_calls.has_value()) response->set_speedup_with_calls(*d.speedup_with_calls);
  if (d.rpc_us.has_value()) response->set_rpc_us(*d.rpc_us);
  if (d.read_bytes_per_s.has_value()) response->set_read_bytes_per_s(*d.read_bytes_per_s);
  response->set_cache_share_min(d.cache_share_min);
  response->set_cache_bytes_bf16(d.kv_bytes);
  response->set_cache_bytes_fp8_kv(d.kv_bytes_fp8_kv);
  response->set_batch(static_cast<uint64_t>(d.batch));
  response->set_tokens(static_cast<uint64_t>(d.tokens));
}

}  // namespace

Job::Next HelperJob::Begin(grpc::ByteBuffer* bytes, const Arrival& arrival) {
  retry_after_ms_ = 0;
  cancelled_.store(false, std::memory_order_relaxed);
  status_ = Read(bytes);
  if (!status_.ok()) return Next::kAnswer;
  if (thread().Run(this, arrival.tenant)) return Next::kLater;
  retry_after_ms_ = kHelperRetryMs;
  status_ =
      absl::ResourceExhaustedError(absl::StrCat("as many calls of this rpc of yours wait as may (",
                                                thread().tasks_per_tenant_max(), "); try again"));
  return Next::kAnswer;
}

bool HelperJob::Continue() {
  absl::StatusOr<bool> has_more = false;
  if (is_cancelled()) {
    has_more = absl::CancelledError("the client ended the call, or its deadline passed");
  } else {
    has_more = Compute();
  }
  if (has_more.ok() && *has_more) return true;
  status_ = has_more.status();
  Forget();
  Done();
  return false;
}

absl::Status HelperJob::Answer(grpc::ByteBuffer* reply) {
  if (status_.ok()) *reply = translate::Serialize(response());
  Forget();
  return status_;
}

absl::Status PlanJob::Read(grpc::ByteBuffer* bytes) {
  absl::Status status = ParseBounded(bytes, kPlanBytesMax, &request_);
  if (!status.ok()) return status;
  constexpr uint64_t kBatchMax = kSeqsMax;
  if (request_.batch() > kBatchMax) {
    return Invalid("batch is ", request_.batch(), ", at most ", kBatchMax,
                   " sequences can be live; send fewer, or 0 for the configured workload");
  }
  constexpr uint64_t kTokensMax = kSeqLenMax;
  if (request_.tokens() > kTokensMax) {
    return Invalid("tokens is ", request_.tokens(), ", a sequence has at most ", kTokensMax,
                   "; send fewer, or 0 for the configured workload");
  }
  constexpr uint64_t kBytesMax = uint64_t{1} << 53;  // exact in a double
  if (request_.other_bytes() > kBytesMax) {
    return Invalid("other_bytes is ", request_.other_bytes(), ", at most ", kBytesMax,
                   " are planned with; send the bytes of one step");
  }
  constexpr double kRpcUsMax = 1e6;
  if (!(request_.rpc_us() >= 0 && request_.rpc_us() <= kRpcUsMax)) {
    return Invalid("rpc_us is ", request_.rpc_us(), ", allowed are 0 to ", kRpcUsMax,
                   "; send a call's microseconds, or 0 for the server's own setting");
  }
  const bool has_hf_config = request_.subject_case() == v1::PlanPrecisionRequest::kHfConfigJson;
  if (has_hf_config && request_.hf_config_json().size() > kHfConfigBytesMax) {
    return Invalid("hf_config_json has ", request_.hf_config_json().size(), " bytes, at most ",
                   kHfConfigBytesMax, " are read; send the model's config.json alone");
  }
  if (has_hf_config && (request_.batch() == 0 || request_.tokens() == 0)) {
    return Invalid("batch is ", request_.batch(), " and tokens ", request_.tokens(),
                   ", a described model has no configured workload; send both");
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> PlanJob::Compute() {
  absl::Status status = Plan();
  if (!status.ok()) return status;
  return false;
}

absl::Status PlanJob::Plan() {
  absl::StatusOr<config::ModelOptions> model = ModelToPlan(parts(), request_);
  if (!model.ok()) return model.status();
  absl::StatusOr<ModelGeometry> geometry = config::MakeGeometry(*model, Precision::kFp8Kv);
  if (!geometry.ok()) return geometry.status();
  config::PolicyOptions policy = parts().planner->policy;
  if (request_.has_allow_fp8_kv()) policy.allow_fp8_kv = request_.allow_fp8_kv();
  if (request_.rpc_us() > 0) policy.rpc_us = request_.rpc_us();
  config::Workload workload{
      .batch = model->expected_seqs, .tokens = model->expected_tokens, .other_bytes = std::nullopt};
  if (request_.batch() != 0) workload.batch = static_cast<int64_t>(request_.batch());
  if (request_.tokens() != 0) workload.tokens = static_cast<int64_t>(request_.tokens());
  if (model->other_bytes.has_value()) {
    workload.other_bytes = static_cast<double>(*model->other_bytes);
  }
  if (request_.other_bytes() != 0) {
    workload.other_bytes = static_cast<double>(request_.other_bytes());
  }
  config::PrecisionChoice choice = model->precision;
  if (!policy.allow_fp8_kv) choice = config::PrecisionChoice::kAuto;  // says so in the reason
  const absl::StatusOr<config::PrecisionDecision> decision = config::DecidePrecision(
      *geometry, choice, workload, policy,
      parts().planner->calibration.has_value() ? &*parts().planner->calibration : nullptr);
  if (!decision.ok()) return decision.status();
  response_.Clear();
  SetNumbers(*decision, &response_);
  return request_.subject_case() == v1::PlanPrecisionRequest::kHfConfigJson ? absl::OkStatus()
                                                                            : SetLive();
}

absl::Status PlanJob::SetLive() {
  const absl::StatusOr<int32_t> index = translate::FindModel(
      *parts().catalog, request_.model(), static_cast<int64_t>(request_.model().size()));
  if (!index.ok()) return index.status();
  const std::optional<config::LiveVerdict> verdict = parts().planner->live(*index);
  if (!verdict.has_value()) return absl::OkStatus();
  v1::LiveLoad& live = *response_.mutable_live();
  live.set_seconds(verdict->seconds);
  live.set_steps(verdict->steps);
  live.set_batch(verdict->batch);
  live.set_tokens(verdict->tokens);
  live.set_cache_share(verdict->cache_share);
  live.set_predicted_speedup(verdict->decision.predicted_speedup);
  live.set_precision(translate::FromPrecision(verdict->decision.precision));
  live.set_contradicts(verdict->contradicts);
  live.set_hint(verdict->hint);
  return absl::OkStatus();
}

}  // namespace fp8kvd::rpc
