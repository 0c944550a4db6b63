#include <algorithm>
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

// A request that may have to be sent again. Its rows lie with the caller until Send has put them
// into a session, then there; it has a copy of its own of the rest.
struct Kept {
  Kept(const DecodeArgs& from, uint64_t order_of_send)
      : order(order_of_send),
        handles(from.handles.begin(), from.handles.end()),
        positions(from.positions.begin(), from.positions.end()),
        q_lens(from.q_lens.begin(), from.q_lens.end()),
        sink_logits(from.sink_logits.begin(), from.sink_logits.end()),
        args(from) {
    args.handles = handles;
    args.positions = positions;
    args.q_lens = q_lens;
    args.sink_logits = sink_logits;
  }
  ~Kept() { LetGo(); }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;

  void MoveTo(std::shared_ptr<SharedSession> to, SharedCallPtr sent) {
    args.q = sent->q;
    args.k = sent->k;
    args.v = sent->v;
    LetGo();
    session = std::move(to);
    call = std::move(sent);
  }
  void LetGo() const {
    if (call != nullptr) session->LetGo(call.get());
  }

  const uint64_t order;
  const std::vector<Handle> handles;
  const std::vector<uint64_t> positions;
  const std::vector<uint32_t> q_lens;
  const std::vector<float> sink_logits;
  DecodeArgs args;
  std::shared_ptr<SharedSession> session;  // where its rows lie, once sent
  SharedCallPtr call;
};

// mu_ guards everything; it is held over a Send into the session, which may wait for replies, but
// never while Receive waits. Who finds the session broken recovers: keeps the replies that are
// there, opens another session and sends what is unanswered again, out of the memory of the one
// before; or hands all of it to a stream of gRPC, where the stream then stays.
class SharedStream final : public DecodeStream::Impl {
 public:
  SharedStream(std::shared_ptr<Core> core, int32_t in_flight_max)
      : core_(std::move(core)),
        in_flight_max_(in_flight_max),
        retry_(core_->options(), Clock::time_point::max()) {}

  absl::Status Send(uint64_t request_id, const DecodeArgs& args) override;
  absl::StatusOr<StreamReply> Receive() override;

 private:
  absl::Status SendShared(uint64_t request_id, Kept* kept);
  absl::Status Recover();
  void KeepReplies();
  absl::Status Resend();
  StreamReply ReplyOf(SharedCall* call);
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
  std::map<uint64_t, std::unique_ptr<Kept>> unanswered_;  // by request_id
  SharedInbox answered_;                                  // by earlier sessions, to be received
};

absl::Status SharedStream::Send(uint64_t request_id, const DecodeArgs& args) {
  std::unique_lock<std::mutex> lock(mu_);
  if (!broken_.ok()) return broken_;
  if (grpc_ != nullptr) {
    lock.unlock();
    return grpc_->Send(request_id, args);
  }
  if (unanswered_.size() + answered_.size() >= static_cast<size_t>(in_flight_max_)) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "DecodeStream: ", in_flight_max_, " requests are in flight, the most; Receive first"));
  }
  const bool is_answered = std::any_of(answered_.begin(), answered_.end(),
                                       [&](const auto& call) { return call->id == request_id; });
  if (is_answered || unanswered_.contains(request_id)) {
    return absl::InvalidArgumentError(absl::StrCat("DecodeStream: request_id ", request_id,
                                                   " is in flight already; give another"));
  }
  Kept* const kept = (unanswered_[request_id] = std::make_unique<Kept>(args, sent_++)).get();
  const uint64_t bytes = SharedSession::RoomFor(args);
  const bool may_leave = core_->options().transport == Transport::kAuto;
  if (session_ == nullptr || session_->is_broken()) {
    // What no session holds ends alone, as it does in one that is open.
    const absl::Status status = may_leave ? absl::OkStatus() : core_->Shared(bytes).status();
    if (!absl::IsInvalidArgument(status)) return Recover();
    unanswered_.erase(request_id);
    return status;
  }
  if (bytes > session_->bytes_max() && may_leave) return Recover();  // on to gRPC
  const absl::Status status = SendShared(request_id, kept);
  if (absl::IsUnavailable(status)) return Recover();
  if (!status.ok()) unanswered_.erase(request_id);
  return status;
}

absl::Status SharedStream::SendShared(uint64_t request_id, Kept* kept) {
  SharedMessage message = DecodeMessageOf(kept->args, core_->options().timeout_ms);
  v1::DecodeRequest head = HeadOf(kept->args);
  head.set_request_id(request_id);
  message.head = head.SerializeAsString();
  absl::StatusOr<SharedCallPtr> call = session_->Send(message, request_id, Until(), inbox_);
  if (!call.ok()) return call.status();
  kept->MoveTo(session_, *std::move(call));
  return absl::OkStatus();
}

// A session, or gRPC, with everything unanswered sent again in its order. Holds mu_.
absl::Status SharedStream::Recover() {
  for (;;) {
    const bool was_open = session_ != nullptr;
    KeepReplies();
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

// What the session answered before, it answered for good: its memory may be another's by now.
void SharedStream::KeepReplies() {
  if (session_ == nullptr) return;
  SharedInbox done = session_->Detach(inbox_);
  const bool is_broken = session_->is_broken();  // asked after: what its end failed is lost
  for (SharedCallPtr& call : done) {
    const bool is_lost = is_broken && absl::IsUnavailable(call->status);
    if (!is_lost && unanswered_.erase(call->id) > 0) answered_.push_back(std::move(call));
  }
}

absl::Status SharedStream::Resend() {
  std::map<uint64_t, std::pair<uint64_t, Kept*>> in_order;
  uint64_t bytes = 0;
  for (const auto& [id, kept] : unanswered_) {
    in_order[kept->order] = {id, kept.get()};
    bytes = std::max(bytes, SharedSession::RoomFor(kept->args));
  }
  const auto session = core_->Shared(bytes);
  if (!session.ok()) return session.status();
  session_ = *session;
  inbox_ = std::make_shared<SharedInbox>();
  if (session_ == nullptr) grpc_ = Impl::OverGrpc(core_, in_flight_max_);
  for (const auto& [order, entry] : in_order) {
    const auto& [id, kept] = entry;
    absl::Status status = grpc_ != nullptr ? grpc_->Send(id, kept->args) : SendShared(id, kept);
    if (!status.ok()) return status;
  }
  if (grpc_ != nullptr) unanswered_.clear();
  return absl::OkStatus();
}

StreamReply SharedStream::ReplyOf(SharedCall* call) {
  retry_.Reset();
  StreamReply reply{.request_id = call->id, .status = call->status};
  reply.retry_after_ms = static_cast<uint32_t>(call->pushback_ms.value_or(0));
  reply.reply = std::move(call->reply);
  return reply;
}

absl::StatusOr<StreamReply> SharedStream::Receive() {
  const SharedSession::Time until = Until();
  for (;;) {
    std::shared_ptr<SharedSession> session;
    std::shared_ptr<SharedInbox> inbox;
    std::shared_ptr<DecodeStream::Impl> grpc;
    {
      const std::lock_guard<std::mutex> lock(mu_);
      if (!answered_.empty()) {
        const SharedCallPtr call = std::move(answered_.front());
        answered_.pop_front();
        return ReplyOf(call.get());
      }
      if (grpc_ == nullptr && unanswered_.empty()) {
        return absl::FailedPreconditionError("DecodeStream: nothing is in flight; Send first");
      }
      if (!broken_.ok()) return broken_;
      session = session_;
      inbox = inbox_;
      grpc = grpc_;
    }
    if (grpc != nullptr) return grpc->Receive();
    session->WaitForDone(*inbox, until);
    const std::lock_guard<std::mutex> lock(mu_);
    if (session != session_) continue;  // Send has recovered meanwhile
    const SharedCallPtr call = session->TakeDone(inbox.get());
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
    return ReplyOf(call.get());
  }
}

}  // namespace

std::unique_ptr<DecodeStream::Impl> DecodeStream::Impl::OverSharedMemory(std::shared_ptr<Core> core,
                                                                         int32_t in_flight_max) {
  return std::make_unique<SharedStream>(std::move(core), in_flight_max);
}

}  // namespace fp8kvd::client
