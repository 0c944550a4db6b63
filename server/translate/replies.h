// server/translate/replies.h: the answer to a message with tensors as bytes for gRPC. out and lse
// go from the staging slots into the message's one slice by one copy; then the slots are free.
//
// Threads: pure functions. Cost: one allocation of the message's size.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "grpcpp/support/byte_buffer.h"

#include "fp8kvd/v1/kv.pb.h"
#include "server/translate/requests.h"

namespace fp8kvd::translate {

// The message as a whole was answered with an OK status. Rows of failed items are zero in out and
// lse, whatever the slots hold there. Times are those of the part that took longest. now: when the
// reply is begun.
grpc::ByteBuffer DecodeReply(const DecodeMessage& message, engine::TimeUs now);

// The same in parts, for a transport whose tensors lie beside the message: all but out and lse, and
// these two to where there is room for their out_bytes() and lse_bytes().
v1::DecodeResponse DecodeReplyHead(const DecodeMessage& message, engine::TimeUs now);
void CopyReplyTensors(const DecodeMessage& message, uint8_t* out, uint8_t* lse);

// What an append's chunk reports for each of its layers.
void AddCommitted(const engine::AppendRequest& request, v1::AppendResponse* to);

// A stream's message that failed as a whole.
grpc::ByteBuffer DecodeErrorReply(uint64_t request_id, const absl::Status& status,
                                  int32_t retry_after_ms);

// Any message as gRPC sends it, and back: false where the bytes are none of it.
grpc::ByteBuffer Serialize(const google::protobuf::Message& message);
bool Parse(const grpc::ByteBuffer& bytes, google::protobuf::Message* message);

}  // namespace fp8kvd::translate
