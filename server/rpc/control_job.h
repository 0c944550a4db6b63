// server/rpc/control_job.h: the job of a request without tensors, typed by its two messages.
#pragma once

#include <memory>

#include "absl/strings/str_cat.h"

#include "server/engine/control_spread.h"
#include "server/rpc/job.h"
#include "server/translate/control.h"
#include "server/translate/replies.h"

namespace fp8kvd::rpc {

// Bytes of a message without tensors: kItemsMax handles and lengths take about 40 KiB. A parsed
// message takes up to 25 times its bytes in memory, so this stands before the parse.
inline constexpr size_t kControlBytesMax = size_t{128} << 10;

// INVALID_ARGUMENT where the bytes are more than bytes_max, or none of the message.
inline absl::Status ParseBounded(grpc::ByteBuffer* bytes, size_t bytes_max,
                                 google::protobuf::Message* message) {
  const size_t size = bytes->Length();
  if (size > bytes_max) {
    return absl::InvalidArgumentError(absl::StrCat("the message has ", size,
                                                   " bytes, this rpc takes ", bytes_max,
                                                   "; split it into several calls"));
  }
  const bool parsed = translate::Parse(*bytes, message);
  bytes->Clear();
  if (parsed) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "the bytes are no message of this rpc; send fp8kvd.v1 messages as protobuf encodes them");
}

template <typename RequestMessage, typename ReplyMessage>
class ControlJob final : public Job {
 public:
  ControlJob(const Parts* parts, Poller* poller, WorkOwner* owner)
      : Job(parts, poller, owner), spread_(parts->fleet) {}

  Next Begin(grpc::ByteBuffer* bytes, const Arrival& arrival) override {
    RequestMessage message;
    status_ = ParseBounded(bytes, kControlBytesMax, &message);
    if (!status_.ok()) return Next::kAnswer;
    absl::StatusOr<translate::ControlRequestPtr> request =
        translate::ToControl(*parts().catalog, message);
    status_ = request.status();
    if (!status_.ok()) return Next::kAnswer;
    request_ = *std::move(request);
    status_ = spread_.Submit(request_.get(), SenderOf(arrival));
    if (status_.ok()) {
      Expect();
      return Next::kLater;
    }
    retry_after_ms_ = request_->retry_after_ms;
    return Next::kAnswer;
  }

  absl::Status Answer(grpc::ByteBuffer* reply) override {
    if (!status_.ok()) return status_;
    retry_after_ms_ = request_->retry_after_ms;
    if (!request_->status.ok()) return request_->status;
    ReplyMessage message;
    translate::ToReply(*parts().catalog, *request_, &message);
    *reply = translate::Serialize(message);
    return absl::OkStatus();
  }

  void Cancel() override { spread_.Cancel(); }

 private:
  bool GoesOn() override { return spread_.GoOn(); }

  engine::ControlSpread spread_;
  translate::ControlRequestPtr request_;
  absl::Status status_;
};

}  // namespace fp8kvd::rpc
