#include "server/engine/spread.h"

#include "config/base/check.h"

namespace fp8kvd::engine {

void Sender::Sign(Request* request) const {
  request->done = done;
  request->tenant = tenant;
  request->arrived = arrived;
  request->staged = staged;
  request->deadline = deadline;
  request->looks_on = looks_on;
}

DecodeSpread::~DecodeSpread() { FP8KVD_CHECK(slots_.empty()); }

absl::Status DecodeSpread::AcquireSlots(absl::Span<DecodePart* const> parts,
                                        cache::TenantId tenant) {
  FP8KVD_CHECK(slots_.empty());
  retry_after_ms_ = 0;
  parts_ = parts;
  for (const DecodePart* const part : parts) {
    absl::StatusOr<StagingSlot> slot =
        fleet_->Of(part->device).staging().Acquire(part->slot_bytes, tenant);
    if (!slot.ok()) {
      Release();
      return slot.status();
    }
    slots_.push_back(*slot);
  }
  return absl::OkStatus();
}

absl::Status DecodeSpread::Submit(const Sender& sender) {
  const auto submit = [this](DecodePart* part) {
    return fleet_->Of(part->device).Submit(&part->request);
  };
  DecodeRequest& first = parts_.front()->request;
  if (parts_.size() == 1) {
    sender.Sign(&first);
    absl::Status status = submit(parts_.front());
    if (!status.ok()) retry_after_ms_ = first.retry_after_ms;
    return status;
  }
  join_.Open(sender.done, static_cast<int32_t>(parts_.size()));
  int32_t refused = 0;
  for (DecodePart* const part : parts_) {
    sender.Sign(&part->request);
    part->request.done = &join_;
    part->request.is_rest = part != parts_.front();
    const absl::Status status = submit(part);
    if (status.ok()) continue;
    part->request.status = status;
    ++refused;
  }
  if (join_.Close(refused)) return absl::OkStatus();
  retry_after_ms_ = first.retry_after_ms;
  return first.status;
}

absl::Status DecodeSpread::Finish() {
  const DecodePart* ended = nullptr;  // that decides for all
  size_t failed = 0;
  for (const DecodePart* const part : parts_) {
    const absl::Status& status = part->request.status;
    if (status.ok()) continue;
    ++failed;
    const bool is_final = absl::IsUnavailable(status) || absl::IsCancelled(status);
    if (ended == nullptr && (is_final || failed == parts_.size())) ended = part;
  }
  if (ended != nullptr) {
    retry_after_ms_ = ended->request.retry_after_ms;
    return ended->request.status;
  }
  if (failed == 0) return absl::OkStatus();
  for (const DecodePart* const part : parts_) {
    const DecodeRequest& request = part->request;
    if (request.status.ok()) continue;
    for (DecodeItem& item : request.items) {
      if (!item.status.ok()) continue;
      item.status = request.status;
      item.retry_after_ms = request.retry_after_ms;
    }
  }
  return absl::OkStatus();
}

void DecodeSpread::Cancel() {
  for (DecodePart* const part : parts_) {
    part->request.cancelled.store(true, std::memory_order_relaxed);
  }
}

void DecodeSpread::NoteReplies() const {
  for (const DecodePart* const part : parts_) fleet_->Of(part->device).NoteReply(part->request);
}

void DecodeSpread::Release() {
  for (size_t i = 0; i < slots_.size(); ++i) {
    fleet_->Of(parts_[i]->device).staging().Release(slots_[i]);
  }
  slots_.clear();
}

}  // namespace fp8kvd::engine
