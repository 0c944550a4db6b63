#include "server/shm/flight.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "config/base/check.h"
#include "server/shm/session.h"
#include "server/translate/replies.h"
#include "server/translate/status.h"

namespace fp8kvd::shm {
namespace {

// Staging is full for about as long as the launches in flight take.
constexpr int32_t kStagingRetryMs = 5;
// Of an item's error where the room is short: with its frame less than kReplyBytesPerItem.
constexpr size_t kShortTextBytes = 128;
static_assert(kShortTextBytes + 32 <= kReplyBytesPerItem);

absl::Status CheckRoom(uint64_t tensor_bytes, int64_t items, const Rooms& rooms) {
  const uint64_t wanted =
      tensor_bytes + kReplyBytes + kReplyBytesPerItem * static_cast<uint64_t>(items);
  if (rooms.reply.size() >= wanted) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("reply_bytes is ", rooms.reply.size(),
                                                 ", the reply to this request takes ", wanted,
                                                 "; give as much room"));
}

}  // namespace

Answer AnswerError(const absl::Status& status, int32_t retry_after_ms, absl::Span<uint8_t> room) {
  Answer answer{.status = status};
  v1::Error error = translate::ToError(status, retry_after_ms);
  const size_t bytes = error.ByteSizeLong();
  if (bytes > room.size()) {
    const size_t over = bytes - room.size();
    if (over > error.message().size()) return answer;  // the code has to do
    error.mutable_message()->resize(error.message().size() - over);
  }
  answer.head_bytes = error.ByteSizeLong();
  error.SerializeWithCachedSizesToArray(room.data());
  return answer;
}

Flight::~Flight() { FP8KVD_CHECK(!slot_.has_value()); }

translate::Piece Flight::CopyHead(const Taken& taken, const Rooms& rooms) {
  taken_ = taken;
  retry_after_ms_ = 0;
  head_.assign(reinterpret_cast<const char*>(rooms.head.data()), rooms.head.size());
  return {reinterpret_cast<const uint8_t*>(head_.data()), head_.size()};
}

absl::Status Flight::AcquireSlot(int64_t bytes) {
  absl::StatusOr<engine::StagingSlot> slot =
      parts().engine->staging().Acquire(bytes, session_->tenant());
  if (!slot.ok()) {
    if (absl::IsResourceExhausted(slot.status())) retry_after_ms_ = kStagingRetryMs;
    return slot.status();
  }
  slot_ = *slot;
  return absl::OkStatus();
}

absl::Status Flight::SubmitTo(engine::Request* request, uint32_t timeout_ms) {
  request->done = this;
  request->tenant = session_->tenant();
  request->arrived = taken_.arrived;
  request->staged = parts().clock->NowUs();
  request->deadline = engine::kNoDeadline;
  for (const uint32_t timeout : {timeout_ms, taken_.request.timeout_ms}) {
    if (timeout == 0) continue;
    request->deadline = std::min(request->deadline, taken_.arrived + int64_t{timeout} * 1000);
  }
  absl::Status status = parts().engine->Submit(request);
  if (!status.ok()) retry_after_ms_ = request->retry_after_ms;
  return status;
}

void Flight::Drop() {
  if (slot_.has_value()) parts().engine->staging().Release(*slot_);
  slot_.reset();
}

absl::Status DecodeFlight::Load(const Taken& taken, const Rooms& rooms) {
  const translate::Piece head = CopyHead(taken, rooms);
  absl::Status status = message_.Check(*parts().catalog, {&head, 1}, &rooms.tensors);
  if (!status.ok()) return status;
  const uint64_t tensors = AlignUp(static_cast<uint64_t>(message_.out_bytes())) +
                           AlignUp(static_cast<uint64_t>(message_.lse_bytes()));
  status = CheckRoom(tensors, static_cast<int64_t>(message_.request().items.size()), rooms);
  if (!status.ok()) return status;
  status = AcquireSlot(message_.slot_bytes());
  if (status.ok()) message_.Load(slot_bytes());
  return status;
}

absl::Status DecodeFlight::Submit() {
  is_running_ = true;  // before Submit, which may come to Done
  absl::Status status = SubmitTo(&message_.request(), message_.timeout_ms());
  if (status.ok()) return status;
  is_running_ = false;
  Drop();
  return status;
}

void DecodeFlight::OnPosted() {
  is_running_ = false;
  session()->OnDone(this);
}

Answer DecodeFlight::Finish(absl::Span<uint8_t> room) {
  const engine::DecodeRequest& request = message_.request();
  Answer answer;
  if (request.status.ok()) {
    answer.out_bytes = static_cast<uint64_t>(message_.out_bytes());
    answer.lse_at = AlignUp(answer.out_bytes);
    answer.lse_bytes = static_cast<uint64_t>(message_.lse_bytes());
    answer.head_at = answer.lse_at + AlignUp(answer.lse_bytes);
    translate::CopyReplyTensors(message_, room.data(), room.data() + answer.lse_at);
    v1::DecodeResponse head = translate::DecodeReplyHead(message_, parts().clock->NowUs());
    answer.head_bytes = head.ByteSizeLong();
    if (answer.head_bytes > room.size() - answer.head_at) {
      for (v1::ItemError& item : *head.mutable_item_errors()) {
        std::string* const text = item.mutable_error()->mutable_message();
        text->resize(std::min(text->size(), kShortTextBytes));
      }
      answer.head_bytes = head.ByteSizeLong();
    }
    FP8KVD_CHECK(answer.head_bytes <= room.size() - answer.head_at);
    head.SerializeWithCachedSizesToArray(room.data() + answer.head_at);
    parts().engine->NoteReply(request);
  } else {
    retry_after_ms_ = request.retry_after_ms;
    answer = AnswerError(request.status, retry_after_ms_, room);
  }
  Drop();
  return answer;
}

absl::Status AppendFlight::Load(const Taken& taken, const Rooms& rooms) {
  const translate::Piece head = CopyHead(taken, rooms);
  absl::Status status = message_.Check(*parts().catalog, {&head, 1}, &rooms.tensors);
  if (!status.ok()) return status;
  status = CheckRoom(0, message_.request().layers_count, rooms);
  if (!status.ok()) return status;
  status = AcquireSlot(message_.slot_bytes());
  if (!status.ok()) return status;
  status = message_.Load(slot_bytes());
  if (!status.ok()) Drop();
  return status;
}

absl::Status AppendFlight::Submit() {
  absl::Status status = SubmitTo(&message_.request(), /*timeout_ms=*/0);
  if (!status.ok()) Drop();
  return status;
}

void AppendFlight::OnPosted() { session()->OnDone(this); }

Answer AppendFlight::Finish(absl::Span<uint8_t> room) {
  Drop();
  const engine::AppendRequest& request = message_.request();
  if (!request.status.ok()) {
    retry_after_ms_ = request.retry_after_ms;
    return AnswerError(request.status, retry_after_ms_, room);
  }
  v1::AppendResponse head;
  translate::AddCommitted(request, &head);
  Answer answer{.status = absl::OkStatus(), .head_bytes = head.ByteSizeLong()};
  FP8KVD_CHECK(answer.head_bytes <= room.size());
  head.SerializeWithCachedSizesToArray(room.data());
  return answer;
}

}  // namespace fp8kvd::shm
