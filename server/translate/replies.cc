#include "server/translate/replies.h"

#include <algorithm>
#include <cstring>

#include "google/protobuf/io/coded_stream.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "grpcpp/support/slice.h"

#include "config/base/check.h"
#include "server/translate/status.h"

namespace fp8kvd::translate {
namespace {

using google::protobuf::io::CodedOutputStream;

constexpr int kOutField = v1::DecodeResponse::kOutFieldNumber;
constexpr int kLseField = v1::DecodeResponse::kLseFieldNumber;

uint32_t Microseconds(int64_t us) {
  return static_cast<uint32_t>(std::clamp<int64_t>(us, 0, UINT32_MAX));
}

// A bytes field's tag and length; nothing for an empty one.
size_t HeadBytes(int64_t size) {
  return size == 0 ? 0 : 1 + CodedOutputStream::VarintSize64(static_cast<uint64_t>(size));
}

uint8_t* WriteHead(int field, int64_t size, uint8_t* to) {
  *to++ = static_cast<uint8_t>(field << 3 | 2);
  return CodedOutputStream::WriteVarint64ToArray(static_cast<uint64_t>(size), to);
}

// Copies [tokens, row_bytes], then clears the rows of items that failed.
uint8_t* WriteRows(int field, const void* rows, int64_t tokens, int64_t row_bytes,
                   absl::Span<const engine::DecodeItem> items, uint8_t* to) {
  if (rows == nullptr) return to;
  to = WriteHead(field, tokens * row_bytes, to);
  std::memcpy(to, rows, tokens * row_bytes);
  for (const engine::DecodeItem& item : items) {
    if (!item.status.ok()) std::memset(to + item.row * row_bytes, 0, item.q_len * row_bytes);
  }
  return to + tokens * row_bytes;
}

}  // namespace

grpc::ByteBuffer DecodeReply(const DecodeMessage& message, engine::TimeUs now) {
  const engine::DecodeRequest& request = message.request();
  v1::DecodeResponse rest;  // everything but the tensors
  rest.set_request_id(message.request_id());
  const int64_t out_bytes = message.tokens() * message.out_row_bytes();
  ItemErrors errors(ItemErrors::kTextBytesMin + out_bytes);
  for (size_t i = 0; i < request.items.size(); ++i) {
    const engine::DecodeItem& item = request.items[i];
    if (item.status.ok()) continue;
    *rest.add_item_errors() = errors.Next(i, item.status, item.retry_after_ms);
  }
  if (request.batch_items > 0) {
    v1::StepTimings* timings = rest.mutable_timings();
    const engine::TimeUs staged = std::max(request.staged, request.arrived);
    timings->set_stage_us(Microseconds(staged - request.arrived));
    timings->set_queue_us(Microseconds(request.launched - staged));
    timings->set_kernel_us(Microseconds(request.fenced - request.launched));
    timings->set_batch_items(static_cast<uint32_t>(request.batch_items));
    timings->set_reply_us(Microseconds(now - request.fenced));
  }
  const int64_t lse_row_bytes = message.q_heads() * static_cast<int64_t>(sizeof(float));
  const int64_t lse_bytes = request.lse == nullptr ? 0 : message.tokens() * lse_row_bytes;
  const size_t rest_bytes = rest.ByteSizeLong();
  const size_t size =
      rest_bytes + HeadBytes(out_bytes) + out_bytes + HeadBytes(lse_bytes) + lse_bytes;
  grpc_slice bytes = grpc_slice_malloc(size);
  uint8_t* const begin = GRPC_SLICE_START_PTR(bytes);
  uint8_t* to = rest.SerializeWithCachedSizesToArray(begin);
  to = WriteRows(kOutField, request.out, message.tokens(), message.out_row_bytes(), request.items,
                 to);
  to = WriteRows(kLseField, request.lse, message.tokens(), lse_row_bytes, request.items, to);
  FP8KVD_CHECK(to == begin + size);
  const grpc::Slice slice(bytes, grpc::Slice::STEAL_REF);
  return grpc::ByteBuffer(&slice, 1);
}

grpc::ByteBuffer DecodeErrorReply(uint64_t request_id, const absl::Status& status,
                                  int32_t retry_after_ms) {
  v1::DecodeResponse reply;
  reply.set_request_id(request_id);
  *reply.mutable_error() = ToError(status, retry_after_ms);
  return Serialize(reply);
}

grpc::ByteBuffer Serialize(const google::protobuf::Message& message) {
  grpc_slice bytes = grpc_slice_malloc(message.ByteSizeLong());
  message.SerializeWithCachedSizesToArray(GRPC_SLICE_START_PTR(bytes));
  const grpc::Slice slice(bytes, grpc::Slice::STEAL_REF);
  return grpc::ByteBuffer(&slice, 1);
}

bool Parse(const grpc::ByteBuffer& bytes, google::protobuf::Message* message) {
  grpc::ByteBuffer copy(bytes);  // shares the slices; the reader wants one it may change
  grpc::ProtoBufferReader reader(&copy);
  return reader.status().ok() && message->ParseFromZeroCopyStream(&reader);
}

}  // namespace fp8kvd::translate
