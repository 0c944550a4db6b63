// server/translate/status.h: an absl::Status as the wire says it: as a gRPC status that ends a
// call, or as the Error of an item or of a stream's message. Same codes, same texts.
//
// A delay goes out as google.rpc.RetryInfo in the status details (grpc-status-details-bin) and,
// from the rpc layer, as the trailer grpc-retry-pushback-ms.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "grpcpp/support/status.h"

#include "fp8kvd/v1/kv.pb.h"

namespace fp8kvd::translate {

inline constexpr char kPushbackTrailer[] = "grpc-retry-pushback-ms";

// retry_after_ms 0: no advice.
grpc::Status ToGrpc(const absl::Status& status, int32_t retry_after_ms);
v1::Error ToError(const absl::Status& status, int32_t retry_after_ms);

// The item errors of one reply, in order. Each has its code; texts that follow text_bytes_max bytes
// of others only point to them, so that a message of tiny items gets no reply out of proportion.
class ItemErrors {
 public:
  static constexpr int64_t kTextBytesMin = int64_t{16} << 10;  // of a reply without tensors

  explicit ItemErrors(int64_t text_bytes_max) : text_bytes_left_(text_bytes_max) {}
  v1::ItemError Next(size_t index, const absl::Status& status, int32_t retry_after_ms);

 private:
  int64_t text_bytes_left_;
};

// google.rpc.Status with one google.rpc.RetryInfo.
std::string StatusDetails(const absl::Status& status, int32_t retry_after_ms);

}  // namespace fp8kvd::translate
