#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "client/cc/convert.h"
#include "client/cc/stream_impl.h"

namespace fp8kvd::client {
namespace {

using std::chrono::milliseconds;

// A request that may have to be sent again: its own copy of what the caller's spans hold.
struct Kept {
  explicit Kept(const DecodeArgs& from)
      : handles(from.handles.begin(), from.handles.end()),
        positions(from.positions.begin(), from.positions.end()),
        q_lens(from.q_lens.begin(), from.q_lens.end()),
        q(from.q.begin(), from.q.end()),
        k(from.k.begin(), from.k.end()),
        v(from.v.begin(), from.v.end()),
        sink_logits(from.sink_logits.begin(), from.sink_logits.end()),
        args(from) {
    args.handles = handles;
    args.positions = positions;
    args.q_lens = q_lens;
    args.q = q;
    args.k = k;
    args.v = v;
    args.sink_logits = sink_logits;
  }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;

  const std::vector<Handle> handles;
  const std::vector<uint64_t> positions;
  const std::vector<uint32_t> q_lens;
  const std::vector<uint16_t> q, k, v;
  const std::vector<float> sink_logits;
  DecodeArgs args;
};

// mu_ guards everything; it is held over a Send into the session, which may wait for replies, but
// never while Receive waits. Who finds the session broken recovers: opens another and sends what is
// unanswered again, or hands all of it to a stream of gRPC, where the stream then stays.
class SharedStream final : public DecodeStream::Impl {
 public:
  SharedStream(std::shared_ptr<Core> core, int32_t in_flight_max)
      : core_(std::move(core)),
        in_flight_max_(in_flight_max),
        retry_(core_->options(), Clock::time_point::max()) {}

  absl::Status Send(uint64_t request_id, const DecodeArgs& args) override;
  absl::StatusOr<StreamReply> Receive() override;

 private:
  absl::Status SendShared(uint64_t request_id, const DecodeArgs& args);
  absl::Status Recover();
  absl::Status Resend();
  SharedSession::Time Until() const {
    return std::chrono::steady_clock::now() + milliseconds(core_->options().timeout_ms);
  }

  const std::shared_ptr<Core> core_;
  const int32_t in_flight_max_;

  std::mutex mu_;
  Retry retry_;
  std::shared_ptr<SharedSession> session_;    // null: none yet
  std::shared_ptr<SharedInbox> inbox_;        // of that session
  std::shared_ptr<DecodeStream::Impl> grpc_;  // from then on alone
  absl::Status broken_;                       // the retries are used up
  uint64_t sent_ = 0;
  struct Unanswered {
    std::unique_ptr<const Kept> kept;
    uint64_t order = 0;
  };
  std::map<uint64_t, Unanswered> unanswered_;  // by request_id
};

absl::Status SharedStream::Send(uint64_t request_id, const DecodeArgs& args) {
  std::unique_lock<std::mutex> lock(mu_);
  if (!broken_.ok()) return broken_;
  if (grpc_ != nullptr) {
    lock.unlock();
    return grpc_->Send(request_id, args);
  }
  if (unanswered_.size() >= static_cast<size_t>(in_flight_max_)) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "DecodeStream: ", in_flight_max_, " requests are in flight, the most; Receive first"));
  }
  if (unanswered_.contains(request_id)) {
    return absl::InvalidArgumentError(absl::StrCat("DecodeStream: request_id ", request_id,
                                                   " is in flight already; give another"));
  }
  unanswered_[request_id] = {std::make_unique<const Kept>(args), sent_++};
  if (session_ == nullptr || session_->is_broken()) return Recover();
  const uint64_t bytes = SharedSession::RoomFor(args);
  const bool may_leave = core_->options().transport == Transport::kAuto;
  if (bytes > session_->bytes_max() && may_leave) return Recover();  // on to gRPC
  const absl::Status status = SendShared(request_id, args);
  if (absl::IsUnavailable(status)) return Recover();
  if (!status.ok()) unanswered_.erase(request_id);
  return status;
}

absl::Status SharedStream::SendShared(uint64_t request_id, const DecodeArgs& args) {
  SharedMessage message = DecodeMessageOf(args, core_->options().timeout_ms);
  v1::DecodeRequest head = HeadOf(args);
  head.set_request_id(request_id);
  message.head = head.SerializeAsString();
  return session_->Send(message, request_id, Until(), inbox_).status();
}

// A session, or gRPC, with everything unanswered sent again in its order. Holds mu_.
absl::Status SharedStream::Recover() {
  for (;;) {
    const bool was_open = session_ != nullptr;
    absl::Status status = Resend();
    if (status.ok()) return status;
    const std::optional<milliseconds> delay =
        was_open || absl::IsUnavailable(status) ? retry_.Next(status, std::nullopt) : std::nullopt;
    if (!delay.has_value() || !core_->Wait(*delay)) {
      broken_ = core_->Explain("DecodeStream", status);
      return broken_;
    }
  }
}

absl::Status SharedStream::Resend() {
  std::map<uint64_t, std::pair<uint64_t, const Kept*>> in_order;
  uint64_t bytes = 0;
  for (const auto& [id, entry] : unanswered_) {
    in_order[entry.order] = {id, entry.kept.get()};
    bytes = std::max(bytes, SharedSession::RoomFor(entry.kept->args));
  }
  const auto session = core_->Shared(bytes);
  if (!session.ok()) return session.status();
  session_ = *session;
  inbox_ = std::make_shared<SharedInbox>();
  if (session_ == nullptr) grpc_ = Impl::OverGrpc(core_, in_flight_max_);
  for (const auto& [order, entry] : in_order) {
    const auto& [id, kept] = entry;
    absl::Status status =
        grpc_ != nullptr ? grpc_->Send(id, kept->args) : SendShared(id, kept->args);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<StreamReply> SharedStream::Receive() {
  const SharedSession::Time until = Until();
  for (;;) {
    std::shared_ptr<SharedSession> session;
    std::shared_ptr<SharedInbox> inbox;
    std::shared_ptr<DecodeStream::Impl> grpc;
    {
      const std::lock_guard<std::mutex> lock(mu_);
      if (grpc_ == nullptr && unanswered_.empty()) {
        return absl::FailedPreconditionError("DecodeStream: nothing is in flight; Send first");
      }
      if (!broken_.ok()) return broken_;
      session = session_;
      inbox = inbox_;
      grpc = grpc_;
    }
    if (grpc != nullptr) return grpc->Receive();
    const SharedCallPtr call = session->Next(inbox.get(), until);
    const std::lock_guard<std::mutex> lock(mu_);
    if (session != session_) continue;  // Send has recovered meanwhile
    if (call == nullptr && !session->is_broken()) {
      return absl::DeadlineExceededError(absl::StrCat("DecodeStream: no reply from ",
                                                      core_->options().target, " within ",
                                                      core_->options().timeout_ms, " ms"));
    }
    if (call == nullptr || (session->is_broken() && absl::IsUnavailable(call->status))) {
      if (absl::Status status = Recover(); !status.ok()) return status;
      continue;
    }
    if (unanswered_.erase(call->id) == 0) continue;  // answered before the session broke
    retry_.Reset();
    StreamReply reply{.request_id = call->id, .status = call->status};
    reply.retry_after_ms = static_cast<uint32_t>(call->pushback_ms.value_or(0));
    reply.reply = std::move(call->reply);
    return reply;
  }
}

}  // namespace

std::unique_ptr<DecodeStream::Impl> DecodeStream::Impl::OverSharedMemory(std::shared_ptr<Core> core,
                                                                         int32_t in_flight_max) {
  return std::make_unique<SharedStream>(std::move(core), in_flight_max);
}

}  // namespace fp8kvd::client
