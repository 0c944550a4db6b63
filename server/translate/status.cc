#include "server/translate/status.h"

#include "google/protobuf/any.pb.h"
#include "google/protobuf/duration.pb.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/wire_format_lite.h"

namespace fp8kvd::translate {
namespace {

using google::protobuf::internal::WireFormatLite;

// gRPC clients refuse metadata above 8 KiB by default, percent-encoding may triple a text.
constexpr size_t kTextBytesMax = 2048;

std::string Text(const absl::Status& status) {
  std::string text(status.message());
  if (text.size() <= kTextBytesMax) return text;
  size_t size = kTextBytesMax;  // not within a character: a reply that is no UTF-8 is none at all
  while (size > 0 && (static_cast<uint8_t>(text[size]) & 0xC0U) == 0x80U) --size;
  text.resize(size);
  return text;
}

void WriteBytes(int field, const std::string& bytes, google::protobuf::io::CodedOutputStream* out) {
  WireFormatLite::WriteBytes(field, bytes, out);
}

}  // namespace

std::string StatusDetails(const absl::Status& status, int32_t retry_after_ms) {
  google::protobuf::Duration delay;
  delay.set_seconds(retry_after_ms / 1000);
  delay.set_nanos(retry_after_ms % 1000 * 1000000);
  // Debian has no package of google/rpc/*.proto. Their fields: RetryInfo {Duration retry_delay =
  // 1}, Status {int32 code = 1; string message = 2; repeated Any details = 3}.
  google::protobuf::Any any;
  any.set_type_url("type.googleapis.com/google.rpc.RetryInfo");
  {
    google::protobuf::io::StringOutputStream stream(any.mutable_value());
    google::protobuf::io::CodedOutputStream out(&stream);
    WriteBytes(1, delay.SerializeAsString(), &out);
  }
  std::string details;
  google::protobuf::io::StringOutputStream stream(&details);
  google::protobuf::io::CodedOutputStream out(&stream);
  WireFormatLite::WriteInt32(1, static_cast<int32_t>(status.code()), &out);
  WriteBytes(2, Text(status), &out);
  WriteBytes(3, any.SerializeAsString(), &out);
  out.Trim();
  return details;
}

grpc::Status ToGrpc(const absl::Status& status, int32_t retry_after_ms) {
  if (status.ok()) return grpc::Status::OK;
  // absl's codes are gRPC's.
  const auto code = static_cast<grpc::StatusCode>(status.code());
  if (retry_after_ms <= 0) return grpc::Status(code, Text(status));
  return grpc::Status(code, Text(status), StatusDetails(status, retry_after_ms));
}

v1::Error ToError(const absl::Status& status, int32_t retry_after_ms) {
  v1::Error error;
  error.set_code(static_cast<int32_t>(status.code()));
  error.set_message(Text(status));
  if (retry_after_ms > 0) error.set_retry_after_ms(static_cast<uint32_t>(retry_after_ms));
  return error;
}

v1::ItemError ItemErrors::Next(size_t index, const absl::Status& status, int32_t retry_after_ms) {
  v1::ItemError error;
  error.set_index(static_cast<uint32_t>(index));
  *error.mutable_error() = ToError(status, retry_after_ms);
  if (text_bytes_left_ <= 0) error.mutable_error()->set_message("see the items before");
  text_bytes_left_ -= static_cast<int64_t>(error.error().message().size());
  return error;
}

}  // namespace fp8kvd::translate
