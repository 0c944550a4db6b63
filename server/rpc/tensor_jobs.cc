#include "server/rpc/tensor_jobs.h"

#include <algorithm>
#include <cstddef>

#include "config/base/check.h"
#include "server/rpc/copiers.h"
#include "server/translate/replies.h"

namespace fp8kvd::rpc {
namespace {

// Staging is full for about as long as the launches in flight take.
constexpr int32_t kStagingRetryMs = 5;

// Room that is kept from message to message: for 8 MiB in gRPC's usual slices. A message in tiny
// ones, which its sender chose, must not cost a waiting job more.
constexpr size_t kSlicesKept = 1024;

absl::Status NoSlices() {
  return absl::InvalidArgumentError(
      "the message cannot be read; send it uncompressed, as protobuf encodes it");
}

}  // namespace

bool MessageSlices::Take(grpc::ByteBuffer* message) {
  Drop();
  if (!message->Valid() || !message->Dump(&slices_).ok()) return false;
  message->Clear();
  pieces_.reserve(slices_.size());
  for (const grpc::Slice& slice : slices_) pieces_.emplace_back(slice.begin(), slice.size());
  return true;
}

void MessageSlices::Drop() {
  pieces_.clear();
  slices_.clear();
  if (slices_.capacity() <= kSlicesKept) return;
  std::vector<translate::Piece>().swap(pieces_);
  std::vector<grpc::Slice>().swap(slices_);
}

absl::Status DecodeJob::Take(grpc::ByteBuffer* message, cache::TenantId tenant) {
  if (!slices_.Take(message)) return NoSlices();
  absl::Status status = message_.Check(*parts().catalog, slices_.pieces());
  if (!status.ok()) return status;
  status = spread_.AcquireSlots(message_.parts(), tenant);
  if (absl::IsResourceExhausted(status)) retry_after_ms_ = kStagingRetryMs;
  return status;
}

Job::Next DecodeJob::Begin(grpc::ByteBuffer* message, const Arrival& arrival) {
  retry_after_ms_ = 0;
  arrival_ = arrival;
  const auto bytes = static_cast<int64_t>(message->Length());
  status_ = Take(message, arrival.tenant);
  if (!status_.ok()) {
    slices_.Drop();
    return Next::kAnswer;
  }
  if (message_.timeout_ms() != 0) {
    arrival_.deadline =
        std::min(arrival_.deadline, arrival.arrived + int64_t{message_.timeout_ms()} * 1000);
  }
  is_loading_ = bytes >= Copiers::kBytesMin;
  if (is_loading_) {
    stage_ = Stage::kLoading;
    parts().copiers->Run(this);
  } else {
    Load();
    if (!Submit()) return Next::kAnswer;
  }
  Expect();
  return Next::kLater;
}

// On a copier.
void DecodeJob::Copy() {
  if (stage_ == Stage::kLoading) {
    Load();
  } else {
    MakeReply();
  }
  Done();
}

void DecodeJob::Load() {
  for (size_t i = 0; i < message_.parts().size(); ++i) message_.Load(i, spread_.slot(i));
  slices_.Drop();
}

bool DecodeJob::Submit() {
  stage_ = Stage::kRunning;
  is_watched_ = poller().has_waited() && poller().watch().may_look_on();
  if (is_watched_) poller().watch().Begin(message_.parts());
  engine::Sender sender = SenderOf(arrival_);
  sender.looks_on = is_watched_;
  status_ = spread_.Submit(sender);
  if (!status_.ok()) NoteEnd();
  return status_.ok();
}

void DecodeJob::MakeReply() {
  reply_ = translate::DecodeReply(message_, parts().clock->NowUs());
  spread_.NoteReplies();
}

void DecodeJob::NoteEnd() {
  if (std::exchange(is_watched_, false)) poller().watch().End(message_.parts());
  retry_after_ms_ = spread_.retry_after_ms();
}

bool DecodeJob::GoesOn() {
  if (std::exchange(is_loading_, false)) return Submit();
  if (stage_ == Stage::kReplying) return false;
  status_ = spread_.Finish();
  NoteEnd();
  if (!status_.ok()) return false;
  if (message_.out_bytes() < Copiers::kBytesMin) {
    MakeReply();
    return false;
  }
  stage_ = Stage::kReplying;
  parts().copiers->Run(this);
  return true;
}

absl::Status DecodeJob::Answer(grpc::ByteBuffer* reply) {
  if (status_.ok()) reply->Swap(&reply_);
  reply_.Clear();
  spread_.Release();
  return status_;
}

AppendWork::~AppendWork() { FP8KVD_CHECK(!slot_.has_value()); }

engine::Engine& AppendWork::engine() const {
  return parts().fleet->Of(parts().fleet->DeviceOf(message_.request().handle));
}

absl::Status AppendWork::Prepare(grpc::ByteBuffer* message, cache::TenantId tenant) {
  retry_after_ms_ = 0;
  grpc::ByteBuffer kept(*message);  // shares the slices
  if (!slices_.Take(&kept)) return NoSlices();
  absl::Status status = message_.Check(*parts().catalog, slices_.pieces());
  if (status.ok() && message_.slot_bytes() > 0) {
    absl::StatusOr<engine::StagingSlot> slot =
        engine().staging().Acquire(message_.slot_bytes(), tenant);
    status = slot.status();
    if (slot.ok()) slot_ = *slot;
  }
  if (!absl::IsResourceExhausted(status)) message->Clear();
  if (status.ok() && is_large()) return status;
  if (slot_.has_value()) {
    loaded_ = message_.Load(slot_->bytes);
    status = FinishLoading();
  }
  slices_.Drop();
  return status;
}

// Neither its end nor a large Run's is expected of the poller (Expect): its post ends the poller's
// wait, whatever that waits for. Uploads were no slower so (docs/performance.md).
void AppendWork::Load(const Arrival* arrival) {
  arrival_.reset();
  if (arrival != nullptr) arrival_ = *arrival;
  parts().copiers->Run(this);
}

// On a copier.
void AppendWork::Copy() {
  absl::Status status = message_.Load(slot_->bytes);
  slices_.Drop();
  if (status.ok() && arrival_.has_value()) {
    SenderOf(*arrival_).Sign(&message_.request());
    status = engine().Submit(&message_.request());
    if (status.ok()) return;  // it may be over by now
  }
  loaded_ = status;
  Done();
}

absl::Status AppendWork::FinishLoading() {
  const absl::Status status = std::exchange(loaded_, absl::OkStatus());
  if (!status.ok()) Drop();
  return status;
}

absl::Status AppendWork::Run(const Arrival& arrival) {
  SenderOf(arrival).Sign(&message_.request());
  absl::Status status = engine().Submit(&message_.request());
  if (status.ok()) {
    if (!is_large()) Expect();
    return status;
  }
  retry_after_ms_ = message_.request().retry_after_ms;
  Drop();
  return status;
}

absl::Status AppendWork::Finish() {
  Drop();
  retry_after_ms_ = message_.request().retry_after_ms;
  absl::Status status = std::exchange(loaded_, absl::OkStatus());
  return status.ok() ? message_.request().status : status;
}

void AppendWork::Drop() {
  if (slot_.has_value()) engine().staging().Release(*slot_);
  slot_.reset();
}

}  // namespace fp8kvd::rpc
