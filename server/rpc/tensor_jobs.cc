#include "server/rpc/tensor_jobs.h"

#include <algorithm>
#include <cstddef>

#include "config/base/check.h"
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

absl::Status DecodeJob::Load(grpc::ByteBuffer* message, cache::TenantId tenant) {
  if (!slices_.Take(message)) return NoSlices();
  absl::Status status = message_.Check(*parts().catalog, slices_.pieces());
  if (!status.ok()) return status;
  status = spread_.AcquireSlots(message_.parts(), tenant);
  if (!status.ok()) {
    if (absl::IsResourceExhausted(status)) retry_after_ms_ = kStagingRetryMs;
    return status;
  }
  for (size_t i = 0; i < message_.parts().size(); ++i) message_.Load(i, spread_.slot(i));
  return absl::OkStatus();
}

Job::Next DecodeJob::Begin(grpc::ByteBuffer* message, const Arrival& arrival) {
  retry_after_ms_ = 0;
  status_ = Load(message, arrival.tenant);
  slices_.Drop();
  if (!status_.ok()) return Next::kAnswer;
  Arrival mine = arrival;
  if (message_.timeout_ms() != 0) {
    mine.deadline =
        std::min(mine.deadline, arrival.arrived + int64_t{message_.timeout_ms()} * 1000);
  }
  status_ = spread_.Submit(SenderOf(mine));
  if (status_.ok()) {
    Expect();
    return Next::kLater;
  }
  retry_after_ms_ = spread_.retry_after_ms();
  return Next::kAnswer;
}

absl::Status DecodeJob::Answer(grpc::ByteBuffer* reply) {
  absl::Status status = status_;
  if (status.ok()) {
    status = spread_.Finish();
    retry_after_ms_ = spread_.retry_after_ms();
  }
  if (status.ok()) {
    *reply = translate::DecodeReply(message_, parts().clock->NowUs());
    spread_.NoteReplies();
  }
  spread_.Release();
  return status;
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
    if (slot.ok()) {
      slot_ = *slot;
      status = message_.Load(slot_->bytes);
      if (!status.ok()) Drop();
    }
  }
  slices_.Drop();
  if (!absl::IsResourceExhausted(status)) message->Clear();
  return status;
}

absl::Status AppendWork::Run(const Arrival& arrival) {
  SenderOf(arrival).Sign(&message_.request());
  absl::Status status = engine().Submit(&message_.request());
  if (status.ok()) {
    Expect();
    return status;
  }
  retry_after_ms_ = message_.request().retry_after_ms;
  Drop();
  return status;
}

absl::Status AppendWork::Finish() {
  Drop();
  retry_after_ms_ = message_.request().retry_after_ms;
  return message_.request().status;
}

void AppendWork::Drop() {
  if (slot_.has_value()) engine().staging().Release(*slot_);
  slot_.reset();
}

}  // namespace fp8kvd::rpc
