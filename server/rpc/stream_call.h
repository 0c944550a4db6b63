// server/rpc/stream_call.h: a DecodeStream: messages are read while earlier ones run, replies go
// out as they are ready, whatever order that is.
//
// Promises: at most stream_inflight_max messages, or kStreamBytesMax bytes of messages and replies,
//   are read and not yet written out, one message at least; beyond that the stream is not read, so
//   a client that sends without reading fills only its own flow-control window. The stream ends
//   with OK once the client has half-closed and every message was answered; while the server
//   drains, with UNAVAILABLE once every message read was answered.
// Order: messages are submitted as they came; one that a copier loads holds up those behind it.
// Threads: its poller's.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "grpcpp/support/async_stream.h"

#include "server/rpc/call.h"
#include "server/rpc/tensor_jobs.h"

namespace fp8kvd::rpc {

class StreamCall final : public Call, private WorkOwner {
 public:
  static constexpr int64_t kStreamBytesMax = kMessageBytesMax;

  explicit StreamCall(MethodSlot* slot);

 private:
  // A message on its way through.
  struct Flight {
    std::unique_ptr<DecodeJob> job;
    int64_t bytes = 0;     // of the message, then of its reply
    bool waiting = false;  // for OnWork
  };

  void Request(Event* arrived) override;
  void OnArrived() override;
  void OnCancelled() override;
  void OnWork(Work* work) override;
  void OnGoesOn(Work* work) override;
  void OnDrain() override;
  void FinishWith(const absl::Status& status, int32_t retry_after_ms) override;
  void Reset() override;
  bool IsBusy() const override { return reading_ || writing_; }
  bool IsWriting() const override { return writing_; }
  Call* Another() const override { return new StreamCall(&slot()); }

  void OnRead(bool ok);
  void OnWritten(bool ok);
  void ReadMore();
  void BeginMessage();
  void TakeMessage();
  void QueueReply(Flight* flight);
  void WriteMore();
  void FinishIfOver();
  Flight* TakeFlight();

  std::vector<std::unique_ptr<Flight>> flights_;  // all, stream_inflight_max at most
  std::vector<Flight*> idle_;
  struct Queued {
    grpc::ByteBuffer bytes;
    Flight* flight;
  };
  std::deque<Queued>
      replies_;  // to be written, oldest first; the first is being written if writing_
  int64_t bytes_held_ = 0;
  Work* loading_ = nullptr;   // of a flight
  bool has_message_ = false;  // message_ was read and waits for it
  bool reading_ = false;
  bool writing_ = false;
  bool read_all_ = false;  // the client has half-closed, or is gone
  bool broken_ = false;    // nothing can be written any more
  grpc::ByteBuffer message_;
  std::optional<grpc::ServerAsyncReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>> stream_;
  MemberEvent<StreamCall> on_read_;
  MemberEvent<StreamCall> on_written_;
};

}  // namespace fp8kvd::rpc
