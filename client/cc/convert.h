// client/cc/convert.h: types.h to and from the proto; the only place that names their fields.
// Bytes of tensors are copied once, since both sides are little-endian.
#pragma once

#include <bit>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "grpcpp/support/status.h"

#include "client/cc/types.h"
#include "fp8kvd/v1/kv.pb.h"

namespace fp8kvd::client {

static_assert(std::endian::native == std::endian::little, "tensors go onto the wire as they lie");

absl::Status ToStatus(const grpc::Status& status);
absl::Status ToStatus(const v1::Error& error);

void ToProto(const Handle& handle, v1::Handle* out);
Handle FromProto(const v1::Handle& handle);

v1::DecodeRequest ToProto(const DecodeArgs& args);
v1::DecodeRequest HeadOf(const DecodeArgs& args);  // without q, k, v
// INTERNAL when out or lse is not a whole number of elements.
absl::StatusOr<DecodeReply> FromProto(const v1::DecodeResponse& response, OutType out_type);

// The same of a reply whose tensors lie beside its message (shared memory).
absl::StatusOr<DecodeReply> DecodeReplyFromParts(absl::Span<const uint8_t> head,
                                                 absl::Span<const uint8_t> out,
                                                 absl::Span<const uint8_t> lse, OutType out_type);
// The error that a reply's head holds; pushback_ms: the delay that it asks for, if it does.
absl::Status ErrorFromHead(uint32_t code, absl::Span<const uint8_t> head,
                           std::optional<int64_t>* pushback_ms);
// The delay of the google.rpc.RetryInfo in a google.rpc.Status, rounded up; nothing where there is
// none, or one that cannot be read.
std::optional<int64_t> RetryInfoMs(const std::string& status_details);
v1::MeasureKvErrorRequest ToProto(uint32_t kv_heads, uint32_t head_dim,
                                  absl::Span<const uint16_t> k, absl::Span<const uint16_t> v);
KvError FromProto(const v1::MeasureKvErrorResponse& response);
v1::MeasureKvErrorRequest ToProto(const MeasureArgs& args);
Accuracy FromProto(const v1::Accuracy& accuracy);

ServerInfo FromProto(const v1::GetServerInfoResponse& response);
PrecisionPlan FromProto(const v1::PlanPrecisionResponse& response);
SequenceInfo FromProto(const v1::SequenceInfo& info);

std::vector<ItemError> ItemErrors(const google::protobuf::RepeatedPtrField<v1::ItemError>& errors);

}  // namespace fp8kvd::client
