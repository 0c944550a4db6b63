#include "server/translate/replies.h"

#include <algorithm>
#include <cstring>

#include "google/protobuf/io/coded_stream.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "grpcpp/support/slice.h"

#include "config/base/check.h"
#include "server/translate/control.h"
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

// Copies a part's rows to their places; those of items that failed become zero.
void CopyRows(const DecodeMessage& message, const engine::DecodePart& part, const void* rows,
              int64_t row_bytes, uint8_t* to) {
  if (rows == nullptr) return;
  const bool is_whole = message.parts().size() == 1;
  const auto* const from = static_cast<const uint8_t*>(rows);
  if (is_whole) std::memcpy(to, from, message.tokens() * row_bytes);
  for (const engine::DecodeItem& item : part.request.items) {
    uint8_t* const at = to + message.RowOf(item) * row_bytes;
    const auto bytes = static_cast<size_t>(item.q_len * row_bytes);
    if (!item.status.ok()) {
      std::memset(at, 0, bytes);
    } else if (!is_whole) {
      std::memcpy(at, from + item.row * row_bytes, bytes);
    }
  }
}

// The request whose launch was finished last.
const engine::DecodeRequest& LastOf(const DecodeMessage& message) {
  const engine::DecodeRequest* last = &message.parts().front()->request;
  for (const engine::DecodePart* const part : message.parts()) {
    const engine::DecodeRequest& request = part->request;
    if (request.batch_items > 0 && (last->batch_items == 0 || request.fenced > last->fenced)) {
      last = &request;
    }
  }
  return *last;
}

}  // namespace

v1::DecodeResponse DecodeReplyHead(const DecodeMessage& message, engine::TimeUs now) {
  v1::DecodeResponse head;
  head.set_request_id(message.request_id());
  ItemErrors errors(ItemErrors::kTextBytesMin + message.out_bytes());
  for (size_t i = 0; i < message.items(); ++i) {
    const engine::DecodeItem& item = message.item(i);
    if (item.status.ok()) continue;
    *head.add_item_errors() = errors.Next(i, item.status, item.retry_after_ms);
  }
  const engine::DecodeRequest& request = LastOf(message);
  if (request.batch_items > 0) {
    v1::StepTimings* timings = head.mutable_timings();
    const engine::TimeUs staged = std::max(request.staged, request.arrived);
    timings->set_stage_us(Microseconds(staged - request.arrived));
    timings->set_queue_us(Microseconds(request.launched - staged));
    timings->set_kernel_us(Microseconds(request.fenced - request.launched));
    timings->set_batch_items(static_cast<uint32_t>(request.batch_items));
    timings->set_reply_us(Microseconds(now - request.fenced));
  }
  return head;
}

void CopyReplyTensors(const DecodeMessage& message, uint8_t* out, uint8_t* lse) {
  const int64_t lse_row_bytes = message.q_heads() * static_cast<int64_t>(sizeof(float));
  for (const engine::DecodePart* const part : message.parts()) {
    CopyRows(message, *part, part->request.out, message.out_row_bytes(), out);
    CopyRows(message, *part, part->request.lse, lse_row_bytes, lse);
  }
}

grpc::ByteBuffer DecodeReply(const DecodeMessage& message, engine::TimeUs now) {
  const v1::DecodeResponse head = DecodeReplyHead(message, now);
  const int64_t out_bytes = message.out_bytes();
  const int64_t lse_bytes = message.lse_bytes();
  const size_t size =
      head.ByteSizeLong() + HeadBytes(out_bytes) + out_bytes + HeadBytes(lse_bytes) + lse_bytes;
  grpc_slice bytes = grpc_slice_malloc(size);
  uint8_t* const begin = GRPC_SLICE_START_PTR(bytes);
  uint8_t* const out = WriteHead(kOutField, out_bytes, head.SerializeWithCachedSizesToArray(begin));
  uint8_t* const lse =
      lse_bytes == 0 ? out + out_bytes : WriteHead(kLseField, lse_bytes, out + out_bytes);
  FP8KVD_CHECK(lse + lse_bytes == begin + size);
  CopyReplyTensors(message, out, lse);
  const grpc::Slice slice(bytes, grpc::Slice::STEAL_REF);
  return grpc::ByteBuffer(&slice, 1);
}

void AddCommitted(const engine::AppendRequest& request, v1::AppendResponse* to) {
  for (int32_t i = 0; i < request.layers_count; ++i) {
    v1::CommittedLength* const committed = to->add_committed();
    *committed->mutable_handle() = FromHandle(request.handle);
    committed->set_layer(static_cast<uint32_t>(request.layer + i));
    committed->set_seq_len(static_cast<uint64_t>(request.seq_lens[i]));
  }
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
