// client/cc/decode_stream.h: decode calls in a pipeline over one stream.
//
// Promises: requests of one (sequence, layer) run in the order of Send. When the connection breaks,
//   a new one is made and everything unanswered is sent again in its order, so that each request
//   gets one reply.
//   The stream is opened by the first Send, and again by the first after a break that found it
//   idle. Through shared memory Receive takes the replies in; without it a stream of gRPC has one
//   background thread that reads.
// Does not manage: backpressure beyond in_flight_max; a caller that is at it receives before it
//   sends.
// Threads: Send and Receive may run on two threads; each of them on one at a time.
// Errors: Receive gives UNAVAILABLE when the retries are used up; the stream is of no use after
//   that.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

#include "client/cc/types.h"

namespace fp8kvd::client {

class Core;

struct StreamReply {
  uint64_t request_id = 0;
  absl::Status status = {};     // of the request as a whole
  uint32_t retry_after_ms = 0;  // with RESOURCE_EXHAUSTED: send it again after that
  DecodeReply reply = {};       // when that is OK
};

class DecodeStream {
 public:
  DecodeStream(std::shared_ptr<Core> core, int32_t in_flight_max);
  ~DecodeStream();  // drops what is unanswered

  // RESOURCE_EXHAUSTED when in_flight_max requests are unanswered or not yet received.
  // INVALID_ARGUMENT when request_id is one of those.
  absl::Status Send(uint64_t request_id, const DecodeArgs& args);

  // The next reply in the order of arrival. FAILED_PRECONDITION when nothing is in flight,
  // DEADLINE_EXCEEDED after Options::timeout_ms without a reply.
  absl::StatusOr<StreamReply> Receive();

  class Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace fp8kvd::client
