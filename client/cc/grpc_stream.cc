#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/cc/convert.h"
#include "client/cc/stream_impl.h"

namespace fp8kvd::client {
namespace {

using Stream = grpc::ClientReaderWriter<v1::DecodeRequest, v1::DecodeResponse>;

// write_mu_ is taken before mu_. Whoever writes to the stream holds write_mu_; mu_ guards the
// tables and is never held over a write, so that the reader can always take replies in while a
// writer is blocked.
class GrpcStream final : public DecodeStream::Impl {
 public:
  GrpcStream(std::shared_ptr<Core> core, int32_t in_flight_max)
      : core_(std::move(core)),
        in_flight_max_(static_cast<size_t>(in_flight_max)),
        reader_([this] { Run(); }) {}

  ~GrpcStream() override {
    {
      const std::lock_guard<std::mutex> lock(mu_);
      closing_ = true;
      if (context_ != nullptr) context_->TryCancel();
    }
    changed_.notify_all();
    reader_.join();
  }

  absl::Status Send(uint64_t request_id, const DecodeArgs& args) override;
  absl::StatusOr<StreamReply> Receive() override;

 private:
  struct Unanswered {
    std::shared_ptr<const v1::DecodeRequest> request;
    OutType out_type = OutType::kBf16;
    uint64_t order = 0;  // of Send
  };

  void Run();
  grpc::Status RunOnce(grpc::ClientContext& context, Retry& retry);
  void Resend(Stream& stream);
  void Take(const v1::DecodeResponse& response);
  bool Pause(std::chrono::milliseconds delay);

  const std::shared_ptr<Core> core_;
  const size_t in_flight_max_;

  std::mutex write_mu_;
  Stream* stream_ = nullptr;  // guarded by write_mu_; null while there is no stream to write to

  std::mutex mu_;
  std::condition_variable changed_;
  bool closing_ = false;
  grpc::ClientContext* context_ = nullptr;  // of the stream that runs
  absl::Status broken_;                     // not OK: the retries are used up
  uint64_t sent_ = 0;
  std::map<uint64_t, Unanswered> unanswered_;  // by request_id
  std::deque<StreamReply> ready_;

  std::thread reader_;  // last: it uses all of the above
};

absl::Status GrpcStream::Send(uint64_t request_id, const DecodeArgs& args) {
  auto request = std::make_shared<v1::DecodeRequest>(ToProto(args));
  request->set_request_id(request_id);
  request->set_timeout_ms(static_cast<uint32_t>(
      std::min<int64_t>(core_->options().timeout_ms, std::numeric_limits<uint32_t>::max())));
  const std::lock_guard<std::mutex> write_lock(write_mu_);
  {
    const std::lock_guard<std::mutex> lock(mu_);
    if (!broken_.ok()) return broken_;
    if (unanswered_.size() + ready_.size() >= in_flight_max_) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "DecodeStream: ", in_flight_max_, " requests are in flight, the most; Receive first"));
    }
    if (!unanswered_.try_emplace(request_id, Unanswered{request, args.out_type, sent_}).second) {
      return absl::InvalidArgumentError(absl::StrCat("DecodeStream: request_id ", request_id,
                                                     " is in flight already; give another"));
    }
    ++sent_;
  }
  // A write that fails needs no word here: the reader notices, and sends all unanswered again.
  if (stream_ != nullptr) {
    stream_->Write(*request);
  } else {
    changed_.notify_all();
  }
  return absl::OkStatus();
}

absl::StatusOr<StreamReply> GrpcStream::Receive() {
  std::unique_lock<std::mutex> lock(mu_);
  if (ready_.empty() && unanswered_.empty()) {
    return absl::FailedPreconditionError("DecodeStream: nothing is in flight; Send first");
  }
  const std::chrono::milliseconds timeout(core_->options().timeout_ms);
  const bool woken =
      changed_.wait_for(lock, timeout, [this] { return !ready_.empty() || !broken_.ok(); });
  if (!ready_.empty()) {
    StreamReply reply = std::move(ready_.front());
    ready_.pop_front();
    return reply;
  }
  if (!woken) {
    return absl::DeadlineExceededError(absl::StrCat("DecodeStream: no reply from ",
                                                    core_->options().target, " within ",
                                                    timeout.count(), " ms"));
  }
  return broken_;
}

void GrpcStream::Run() {
  Retry retry(core_->options(), Clock::time_point::max());
  for (;;) {
    grpc::ClientContext context;
    core_->Prepare(&context);
    {
      std::unique_lock<std::mutex> lock(mu_);
      changed_.wait(lock, [this] { return closing_ || !unanswered_.empty(); });
      if (closing_) return;
      context_ = &context;
    }
    grpc::Status status = RunOnce(context, retry);
    if (status.ok()) status = {grpc::StatusCode::UNAVAILABLE, "the server ended the stream"};
    std::optional<std::chrono::milliseconds> delay;
    {
      const std::lock_guard<std::mutex> lock(mu_);
      context_ = nullptr;
      if (unanswered_.empty() && !closing_) continue;  // nobody waits: no try is spent
      delay = retry.Next(status, context);
      if (!delay.has_value() && !closing_) broken_ = core_->Explain("DecodeStream", status);
    }
    if (!delay.has_value() || !Pause(*delay)) break;
  }
  changed_.notify_all();
}

grpc::Status GrpcStream::RunOnce(grpc::ClientContext& context, Retry& retry) {
  const std::unique_ptr<Stream> stream = core_->stub().DecodeStream(&context);
  std::thread resender([&] { Resend(*stream); });  // beside the reading, else both could block
  v1::DecodeResponse response;
  while (stream->Read(&response)) {
    retry.Reset();
    Take(response);
  }
  resender.join();
  {
    const std::lock_guard<std::mutex> write_lock(write_mu_);
    stream_ = nullptr;
  }
  return stream->Finish();
}

void GrpcStream::Resend(Stream& stream) {
  const std::lock_guard<std::mutex> write_lock(write_mu_);
  std::map<uint64_t, std::shared_ptr<const v1::DecodeRequest>> in_order;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    for (const auto& [id, entry] : unanswered_) in_order[entry.order] = entry.request;
  }
  for (const auto& [order, request] : in_order) stream.Write(*request);
  stream_ = &stream;
}

void GrpcStream::Take(const v1::DecodeResponse& response) {
  {
    const std::lock_guard<std::mutex> lock(mu_);
    const auto found = unanswered_.find(response.request_id());
    if (found == unanswered_.end()) return;
    StreamReply reply{.request_id = response.request_id(),
                      .retry_after_ms = response.error().retry_after_ms()};
    if (response.has_error()) {
      reply.status = ToStatus(response.error());
    } else if (auto decoded = FromProto(response, found->second.out_type); decoded.ok()) {
      reply.reply = *std::move(decoded);
    } else {
      reply.status = decoded.status();
    }
    unanswered_.erase(found);
    ready_.push_back(std::move(reply));
  }
  changed_.notify_all();
}

bool GrpcStream::Pause(std::chrono::milliseconds delay) {
  std::unique_lock<std::mutex> lock(mu_);
  return !changed_.wait_for(lock, delay, [this] { return closing_; });
}

}  // namespace

std::unique_ptr<DecodeStream::Impl> DecodeStream::Impl::OverGrpc(std::shared_ptr<Core> core,
                                                                 int32_t in_flight_max) {
  return std::make_unique<GrpcStream>(std::move(core), in_flight_max);
}

}  // namespace fp8kvd::client
