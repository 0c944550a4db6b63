#include "server/shm/flight.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "config/base/check.h"
#include "proto/fp8kvd/v1/shared_lines.h"
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

translate::Piece Flight::CopyHead(const Taken& taken, const Rooms& rooms) {
  taken_ = taken;
  retry_after_ms_ = 0;
  head_.assign(reinterpret_cast<const char*>(rooms.head.data()), rooms.head.size());
  return {reinterpret_cast<const uint8_t*>(head_.data()), head_.size()};
}

engine::Sender Flight::SenderWith(uint32_t timeout_ms) {
  engine::Sender sender{.done = this,
                        .tenant = session_->tenant(),
                        .arrived = taken_.arrived,
                        .staged = parts().clock->NowUs()};
  for (const uint32_t timeout : {timeout_ms, taken_.request.timeout_ms}) {
    if (timeout == 0) continue;
    sender.deadline = std::min(sender.deadline, taken_.arrived + int64_t{timeout} * 1000);
  }
  return sender;
}

absl::Status DecodeFlight::Load(const Taken& taken, const Rooms& rooms) {
  const translate::Piece head = CopyHead(taken, rooms);
  absl::Status status = message_.Check(*parts().catalog, {&head, 1}, &rooms.tensors);
  if (!status.ok()) return status;
  const uint64_t tensors = AlignUp(static_cast<uint64_t>(message_.out_bytes())) +
                           AlignUp(static_cast<uint64_t>(message_.lse_bytes()));
  status = CheckRoom(tensors, static_cast<int64_t>(message_.items()), rooms);
  if (!status.ok()) return status;
  status = spread_.AcquireSlots(message_.parts(), session()->tenant());
  if (!status.ok()) {
    if (absl::IsResourceExhausted(status)) retry_after_ms_ = kStagingRetryMs;
    return status;
  }
  for (size_t i = 0; i < message_.parts().size(); ++i) message_.Load(i, spread_.slot(i));
  return absl::OkStatus();
}

absl::Status DecodeFlight::Submit() {
  is_running_ = true;  // before Submit, which may come to Done
  engine::Sender sender = SenderWith(message_.timeout_ms());
  sender.looks_on = parts().spin_us > 0;
  if (sender.looks_on) loop()->watch().Begin(message_.parts());
  absl::Status status = spread_.Submit(sender);
  if (status.ok()) return status;
  NoteEnd();
  retry_after_ms_ = spread_.retry_after_ms();
  spread_.Release();
  return status;
}

// A device that asks the cache which all share has its query 0.5 us sooner than one that has to ask
// the processor which wrote it.
void DecodeFlight::PassTensors() const {
  for (size_t i = 0; i < message_.parts().size(); ++i) {
    const uint8_t* const slot = spread_.slot(i);
    const auto* const out = static_cast<const uint8_t*>(message_.parts()[i]->request.out);
    PassLines(slot, static_cast<uint64_t>(out - slot));  // what lies before it came in
  }
}

void DecodeFlight::NoteEnd() {
  is_running_ = false;
  if (parts().spin_us > 0) loop()->watch().End(message_.parts());
}

void DecodeFlight::OnPosted() {
  NoteEnd();
  session()->OnDone(this);
}

Answer DecodeFlight::Finish(absl::Span<uint8_t> room) {
  const absl::Status status = spread_.Finish();
  Answer answer;
  if (status.ok()) {
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
    spread_.NoteReplies();
  } else {
    retry_after_ms_ = spread_.retry_after_ms();
    answer = AnswerError(status, retry_after_ms_, room);
  }
  spread_.Release();
  return answer;
}

AppendFlight::~AppendFlight() { FP8KVD_CHECK(!slot_.has_value()); }

engine::Engine& AppendFlight::engine() const {
  return parts().fleet->Of(parts().fleet->DeviceOf(message_.request().handle));
}

void AppendFlight::Drop() {
  if (slot_.has_value()) engine().staging().Release(*slot_);
  slot_.reset();
}

absl::Status AppendFlight::Load(const Taken& taken, const Rooms& rooms) {
  const translate::Piece head = CopyHead(taken, rooms);
  absl::Status status = message_.Check(*parts().catalog, {&head, 1}, &rooms.tensors);
  if (!status.ok()) return status;
  status = CheckRoom(0, message_.request().layers_count, rooms);
  if (!status.ok()) return status;
  absl::StatusOr<engine::StagingSlot> slot =
      engine().staging().Acquire(message_.slot_bytes(), session()->tenant());
  if (!slot.ok()) {
    if (absl::IsResourceExhausted(slot.status())) retry_after_ms_ = kStagingRetryMs;
    return slot.status();
  }
  slot_ = *slot;
  message_.BeginLoad(slot_->bytes);
  return absl::OkStatus();
}

absl::StatusOr<bool> AppendFlight::ContinueLoad() {
  absl::StatusOr<bool> has_more = message_.ContinueLoad();
  if (!has_more.ok()) Drop();
  return has_more;
}

absl::Status AppendFlight::Submit() {
  SenderWith(/*timeout_ms=*/0).Sign(&message_.request());
  absl::Status status = engine().Submit(&message_.request());
  if (status.ok()) return status;
  retry_after_ms_ = message_.request().retry_after_ms;
  Drop();
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
