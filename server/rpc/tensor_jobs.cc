#include "server/rpc/tensor_jobs.h"

#include <algorithm>

#include "config/base/check.h"
#include "server/translate/replies.h"

namespace fp8kvd::rpc {
namespace {

// Staging is full for about as long as the launches in flight take.
constexpr int32_t kStagingRetryMs = 5;

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
}

DecodeJob::~DecodeJob() { FP8KVD_CHECK(!slot_.has_value()); }

absl::Status DecodeJob::Load(grpc::ByteBuffer* message, cache::TenantId tenant) {
  if (!slices_.Take(message)) return NoSlices();
  absl::Status status = message_.Check(*parts().catalog, slices_.pieces());
  if (!status.ok()) return status;
  absl::StatusOr<engine::StagingSlot> slot =
      parts().engine->staging().Acquire(message_.slot_bytes(), tenant);
  if (!slot.ok()) {
    if (absl::IsResourceExhausted(slot.status())) retry_after_ms_ = kStagingRetryMs;
    return slot.status();
  }
  slot_ = *slot;
  message_.Load(slot_->bytes);
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
  status_ = Submit(&message_.request(), mine);
  return status_.ok() ? Next::kLater : Next::kAnswer;
}

absl::Status DecodeJob::Answer(grpc::ByteBuffer* reply) {
  absl::Status status = status_;
  if (status.ok()) {
    status = message_.request().status;
    retry_after_ms_ = message_.request().retry_after_ms;
  }
  if (status.ok()) {
    *reply = translate::DecodeReply(message_, parts().clock->NowUs());
    parts().engine->NoteReply(message_.request());
  }
  if (slot_.has_value()) parts().engine->staging().Release(*slot_);
  slot_.reset();
  return status;
}

AppendWork::~AppendWork() { FP8KVD_CHECK(!slot_.has_value()); }

absl::Status AppendWork::Prepare(grpc::ByteBuffer* message, cache::TenantId tenant) {
  retry_after_ms_ = 0;
  grpc::ByteBuffer kept(*message);  // shares the slices
  if (!slices_.Take(&kept)) return NoSlices();
  absl::Status status = message_.Check(*parts().catalog, slices_.pieces());
  if (status.ok() && message_.slot_bytes() > 0) {
    absl::StatusOr<engine::StagingSlot> slot =
        parts().engine->staging().Acquire(message_.slot_bytes(), tenant);
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
  absl::Status status = Submit(&message_.request(), arrival);
  if (!status.ok()) Drop();
  return status;
}

absl::Status AppendWork::Finish() {
  Drop();
  retry_after_ms_ = message_.request().retry_after_ms;
  return message_.request().status;
}

void AppendWork::Drop() {
  if (slot_.has_value()) parts().engine->staging().Release(*slot_);
  slot_.reset();
}

}  // namespace fp8kvd::rpc
