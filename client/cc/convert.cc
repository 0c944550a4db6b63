#include "client/cc/convert.h"

#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "google/protobuf/any.pb.h"
#include "google/protobuf/duration.pb.h"
#include "google/protobuf/unknown_field_set.h"

namespace fp8kvd::client {
namespace {

template <typename T>
void SetBytes(absl::Span<const T> elements, std::string* out) {
  out->assign(reinterpret_cast<const char*>(elements.data()), elements.size() * sizeof(T));
}

// Values of the fields of this number that have a length, of a message that nobody declares here.
std::vector<std::string> FieldsWithLength(const std::string& message, int number) {
  std::vector<std::string> values;
  google::protobuf::UnknownFieldSet fields;
  if (!fields.ParseFromString(message)) return values;
  for (int i = 0; i < fields.field_count(); ++i) {
    const google::protobuf::UnknownField& field = fields.field(i);
    const bool has_length = field.type() == google::protobuf::UnknownField::TYPE_LENGTH_DELIMITED;
    if (field.number() == number && has_length) values.push_back(field.length_delimited());
  }
  return values;
}

absl::Span<const uint8_t> BytesOf(const std::string& field) {
  return {reinterpret_cast<const uint8_t*>(field.data()), field.size()};
}

template <typename T>
absl::Status ReadBytes(const char* field, absl::Span<const uint8_t> bytes, std::vector<T>& out) {
  if (bytes.size() % sizeof(T) != 0) {
    return absl::InternalError(absl::StrCat("the server's ", field, " holds ", bytes.size(),
                                            " bytes, not a multiple of ", sizeof(T),
                                            "; client and server differ in version"));
  }
  const T* const begin = reinterpret_cast<const T*>(bytes.data());
  if (reinterpret_cast<uintptr_t>(begin) % alignof(T) == 0) {  // else zeroed first, then copied
    out.assign(begin, begin + bytes.size() / sizeof(T));
    return absl::OkStatus();
  }
  out.resize(bytes.size() / sizeof(T));
  std::memcpy(out.data(), bytes.data(), bytes.size());
  return absl::OkStatus();
}

Precision FromProto(v1::Precision precision) {
  switch (precision) {
    case v1::PRECISION_BF16:
      return Precision::kBf16;
    case v1::PRECISION_FP8_KV:
      return Precision::kFp8Kv;
    default:
      return Precision::kUnspecified;
  }
}

LayerGroupInfo FromProto(const v1::LayerGroupInfo& group) {
  return {.layers = {group.layers().begin(), group.layers().end()},
          .window = group.window(),
          .softcap = group.softcap(),
          .has_sinks = group.has_sinks(),
          .precision = FromProto(group.precision()),
          .pages_total = group.pages_total(),
          .pages_used = group.pages_used(),
          .pages_free = group.pages_free(),
          .page_bytes = group.page_bytes(),
          .page_tokens = group.page_tokens()};
}

ModelInfo FromProto(const v1::ModelInfo& model) {
  ModelInfo out{.name = model.name(),
                .layers = model.layers(),
                .q_heads = model.q_heads(),
                .kv_heads = model.kv_heads(),
                .head_dim = model.head_dim(),
                .sm_scale = model.sm_scale(),
                .precision_reason = model.precision_reason()};
  for (const v1::LayerGroupInfo& group : model.groups()) out.groups.push_back(FromProto(group));
  return out;
}

}  // namespace

absl::Status ToStatus(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

absl::Status ToStatus(const v1::Error& error) {
  return absl::Status(static_cast<absl::StatusCode>(error.code()), error.message());
}

void ToProto(const Handle& handle, v1::Handle* out) {
  out->set_seq_id(handle.seq_id);
  out->set_generation(handle.generation);
  out->set_incarnation(handle.incarnation);
  out->set_home(handle.home);
}

Handle FromProto(const v1::Handle& handle) {
  return {.seq_id = handle.seq_id(),
          .generation = handle.generation(),
          .incarnation = handle.incarnation(),
          .home = handle.home()};
}

v1::DecodeRequest HeadOf(const DecodeArgs& args) {
  v1::DecodeRequest out;
  out.set_model(args.model);
  out.set_layer(args.layer);
  for (const Handle& handle : args.handles) ToProto(handle, out.add_handles());
  out.mutable_positions()->Add(args.positions.begin(), args.positions.end());
  out.mutable_q_lens()->Add(args.q_lens.begin(), args.q_lens.end());
  out.mutable_sink_logits()->Add(args.sink_logits.begin(), args.sink_logits.end());
  out.set_omit_sinks(args.omit_sinks);
  out.set_want_lse(args.want_lse);
  out.set_out_type(args.out_type == OutType::kFp32 ? v1::OUT_TYPE_FP32 : v1::OUT_TYPE_BF16);
  return out;
}

v1::DecodeRequest ToProto(const DecodeArgs& args) {
  v1::DecodeRequest out = HeadOf(args);
  SetBytes(args.q, out.mutable_q());
  SetBytes(args.k, out.mutable_k());
  SetBytes(args.v, out.mutable_v());
  return out;
}

namespace {

absl::StatusOr<DecodeReply> ReplyOf(const v1::DecodeResponse& response,
                                    absl::Span<const uint8_t> out, absl::Span<const uint8_t> lse,
                                    OutType out_type) {
  DecodeReply reply;
  absl::Status status = out_type == OutType::kFp32 ? ReadBytes("out", out, reply.out_fp32)
                                                   : ReadBytes("out", out, reply.out_bf16);
  status.Update(ReadBytes("lse", lse, reply.lse));
  if (!status.ok()) return status;
  reply.item_errors = ItemErrors(response.item_errors());
  reply.stage_us = response.timings().stage_us();
  reply.queue_us = response.timings().queue_us();
  reply.kernel_us = response.timings().kernel_us();
  reply.reply_us = response.timings().reply_us();
  reply.batch_items = response.timings().batch_items();
  return reply;
}

}  // namespace

absl::StatusOr<DecodeReply> FromProto(const v1::DecodeResponse& response, OutType out_type) {
  return ReplyOf(response, BytesOf(response.out()), BytesOf(response.lse()), out_type);
}

absl::StatusOr<DecodeReply> DecodeReplyFromParts(absl::Span<const uint8_t> head,
                                                 absl::Span<const uint8_t> out,
                                                 absl::Span<const uint8_t> lse, OutType out_type) {
  v1::DecodeResponse response;
  if (!response.ParseFromArray(head.data(), static_cast<int>(head.size()))) {
    return absl::InternalError(
        "the server's reply cannot be read; client and server differ in version");
  }
  return ReplyOf(response, out, lse, out_type);
}

absl::Status ErrorFromHead(uint32_t code, absl::Span<const uint8_t> head,
                           std::optional<int64_t>* pushback_ms) {
  v1::Error error;
  (void)error.ParseFromArray(head.data(), static_cast<int>(head.size()));
  error.set_code(static_cast<int32_t>(code));  // also where the room was too small for words
  if (error.retry_after_ms() > 0) *pushback_ms = error.retry_after_ms();
  return ToStatus(error);
}

std::optional<int64_t> RetryInfoMs(const std::string& status_details) {
  // No package that we need declares the two: Status {repeated Any details = 3}, RetryInfo
  // {Duration retry_delay = 1}.
  for (const std::string& detail : FieldsWithLength(status_details, 3)) {
    google::protobuf::Any any;
    if (!any.ParseFromString(detail)) return std::nullopt;
    if (!absl::EndsWith(any.type_url(), "/google.rpc.RetryInfo")) continue;
    for (const std::string& field : FieldsWithLength(any.value(), 1)) {
      google::protobuf::Duration delay;
      constexpr int64_t kSecondsMax = 315'576'000'000;  // of a Duration
      if (!delay.ParseFromString(field) || delay.seconds() < 0 || delay.seconds() > kSecondsMax ||
          delay.nanos() < 0) {
        return std::nullopt;
      }
      return delay.seconds() * 1000 + (int64_t{delay.nanos()} + 999'999) / 1'000'000;
    }
    return 0;
  }
  return std::nullopt;
}

v1::MeasureKvErrorRequest ToProto(uint32_t kv_heads, uint32_t head_dim,
                                  absl::Span<const uint16_t> k, absl::Span<const uint16_t> v) {
  v1::MeasureKvErrorRequest request;
  request.set_kv_heads(kv_heads);
  request.set_head_dim(head_dim);
  SetBytes(k, request.mutable_k());
  SetBytes(v, request.mutable_v());
  return request;
}

KvError FromProto(const v1::MeasureKvErrorResponse& response) {
  return {.k = response.k_error(),
          .v = response.v_error(),
          .k_worst_row = response.k_error_worst_row(),
          .v_worst_row = response.v_error_worst_row()};
}

v1::MeasureKvErrorRequest ToProto(const MeasureArgs& args) {
  v1::MeasureKvErrorRequest request = ToProto(args.kv_heads, args.head_dim, args.k, args.v);
  v1::AttentionQueries& queries = *request.mutable_queries();
  queries.set_q_heads(args.q_heads);
  SetBytes(args.q, queries.mutable_q());
  for (const int32_t position : args.positions) {
    queries.add_positions(static_cast<uint32_t>(position));  // of a negative one, beyond the rows
  }
  if (args.sm_scale.has_value()) queries.set_sm_scale(*args.sm_scale);
  queries.set_window(args.window);
  queries.set_softcap(args.softcap);
  return request;
}

Accuracy FromProto(const v1::Accuracy& accuracy) {
  const auto profile = [](const v1::RowsProfile& rows) {
    RowsProfile out{.amax = rows.amax(),
                    .amax_over_rms = rows.amax_over_rms(),
                    .channel_amax_ratio = rows.channel_amax_ratio(),
                    .subnormal = rows.subnormal()};
    for (const v1::OutlierRow& row : rows.worst()) {
      out.worst.push_back({row.token(), row.kv_head(), row.error(), row.amax()});
    }
    return out;
  };
  Accuracy out{.k = profile(accuracy.k()),
               .v = profile(accuracy.v()),
               .score_spread = accuracy.score_spread(),
               .effective_keys = accuracy.effective_keys()};
  for (const v1::WayError& way : accuracy.ways()) {
    out.ways.push_back({.way = way.way(),
                        .op = way.op(),
                        .op_worst_row = way.op_worst_row(),
                        .k = way.k(),
                        .v = way.v(),
                        .saturated = way.saturated(),
                        .subnormal = way.subnormal()});
  }
  return out;
}

ServerInfo FromProto(const v1::GetServerInfoResponse& response) {
  const v1::Limits& limits = response.limits();
  ServerInfo out{.version = response.version(),
                 .incarnation = response.incarnation(),
                 .device_kind = response.device_kind(),
                 .device_name = response.device_name(),
                 .limits = {.message_bytes_max = limits.message_bytes_max(),
                            .append_chunk_bytes_max = limits.append_chunk_bytes_max(),
                            .items_max = limits.items_max(),
                            .q_len_max = limits.q_len_max(),
                            .seq_len_max = limits.seq_len_max(),
                            .seqs_max = limits.seqs_max(),
                            .lease_ttl_ms_max = limits.lease_ttl_ms_max()},
                 .draining = response.draining(),
                 .shm_socket = response.shm_socket(),
                 .host_id = response.host_id()};
  for (const v1::ModelInfo& model : response.models()) out.models.push_back(FromProto(model));
  for (const v1::DeviceInfo& device : response.devices()) {
    out.devices.push_back({.name = device.name(),
                           .device_name = device.device_name(),
                           .pages_total = device.pages_total(),
                           .pages_used = device.pages_used(),
                           .pages_free = device.pages_free()});
  }
  return out;
}

PrecisionPlan FromProto(const v1::PlanPrecisionResponse& response) {
  PrecisionPlan plan{.precision = FromProto(response.precision()),
                     .reason = response.reason(),
                     .batch = response.batch(),
                     .tokens = response.tokens(),
                     .kv_bytes = response.kv_bytes(),
                     .other_bytes = response.other_bytes(),
                     .cache_share = response.cache_share(),
                     .convertible_share = response.convertible_share(),
                     .cache_share_min = response.cache_share_min(),
                     .r = response.r(),
                     .r_source = response.r_source(),
                     .attention_speedup = response.attention_speedup(),
                     .predicted_speedup = response.predicted_speedup()};
  if (response.has_speedup_with_calls()) plan.speedup_with_calls = response.speedup_with_calls();
  if (response.has_rpc_us()) plan.rpc_us = response.rpc_us();
  if (response.has_read_bytes_per_s()) plan.read_bytes_per_s = response.read_bytes_per_s();
  if (response.has_live()) {
    const v1::LiveLoad& live = response.live();
    plan.live = LiveLoad{.seconds = live.seconds(),
                         .steps = live.steps(),
                         .batch = live.batch(),
                         .tokens = live.tokens(),
                         .cache_share = live.cache_share(),
                         .predicted_speedup = live.predicted_speedup(),
                         .precision = FromProto(live.precision()),
                         .contradicts = live.contradicts(),
                         .hint = live.hint()};
  }
  return plan;
}

SequenceInfo FromProto(const v1::SequenceInfo& info) {
  return {.handle = FromProto(info.handle()),
          .model = info.model(),
          .seq_lens = {info.seq_lens().begin(), info.seq_lens().end()},
          .pages = info.pages(),
          .pages_shared = info.pages_shared(),
          .bytes = info.bytes(),
          .expected_tokens = info.expected_tokens(),
          .ttl_ms = info.ttl_ms(),
          .ttl_left_ms = info.ttl_left_ms()};
}

std::vector<ItemError> ItemErrors(const google::protobuf::RepeatedPtrField<v1::ItemError>& errors) {
  std::vector<ItemError> out;
  out.reserve(errors.size());
  for (const v1::ItemError& error : errors) {
    out.push_back({.index = error.index(),
                   .status = ToStatus(error.error()),
                   .retry_after_ms = error.error().retry_after_ms()});
  }
  return out;
}

}  // namespace fp8kvd::client
