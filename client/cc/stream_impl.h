// client/cc/stream_impl.h: the two ways of a DecodeStream. Private to client/cc.
// Threads: Send and Receive may run on two threads; each of them on one at a time.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

#include "client/cc/core.h"
#include "client/cc/decode_stream.h"

namespace fp8kvd::client {

class DecodeStream::Impl {
 public:
  virtual ~Impl() = default;
  virtual absl::Status Send(uint64_t request_id, const DecodeArgs& args) = 0;
  virtual absl::StatusOr<StreamReply> Receive() = 0;

  // A stream of gRPC, with a thread that reads.
  static std::unique_ptr<Impl> OverGrpc(std::shared_ptr<Core> core, int32_t in_flight_max);
  // Calls of a session of shared memory, and a stream of gRPC from the moment that there is none.
  static std::unique_ptr<Impl> OverSharedMemory(std::shared_ptr<Core> core, int32_t in_flight_max);
};

}  // namespace fp8kvd::client
