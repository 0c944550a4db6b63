// server/engine/spread.h: a decode whose sequences are on several devices: its parts go to their
// engines, and what they answer comes back as one.
//
// Promises: a decode on one device goes to that engine as it is, which tells the call itself. Else
//   the call is told once, when all parts have their answers. An item fails alone, whichever device
//   it is on; the call fails as a whole where all parts did, or where one was cancelled or its
//   device failed or drains.
// Does not manage: which rows go into which slot (translate); where sequences are (fleet.h).
// Threads: one, the call's; but Join::Done, which turns of the engines call.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "server/engine/fleet.h"
#include "server/engine/messages.h"
#include "server/engine/staging.h"

namespace fp8kvd::engine {

// What all parts of a call have in common.
struct Sender {
  Completion* done = nullptr;
  cache::TenantId tenant{0};
  TimeUs arrived = 0;
  TimeUs staged = 0;
  TimeUs deadline = kNoDeadline;
  bool looks_on = false;

  void Sign(Request* request) const;
};

// Counts the parts that are out, and tells the call when they are back.
class Join final : public Completion {
 public:
  // Before the parts are submitted, each of which tells this; then Close.
  void Open(Completion* whole, int32_t parts) {
    whole_ = whole;
    parts_ = parts;
    out_.store(parts + 1, std::memory_order_relaxed);
  }
  // So many parts were not taken. False where none was: then nobody is told.
  bool Close(int32_t refused) {
    if (refused == parts_) return false;
    if (out_.fetch_sub(refused + 1, std::memory_order_acq_rel) == refused + 1) whole_->Done();
    return true;
  }
  void Done() override {
    if (out_.fetch_sub(1, std::memory_order_acq_rel) == 1) whole_->Done();
  }

 private:
  Completion* whole_ = nullptr;
  int32_t parts_ = 0;
  std::atomic<int32_t> out_{0};  // parts, and one for whoever submits them
};

// A decode. Its parts hold slots from AcquireSlots to Release.
class DecodeSpread {
 public:
  explicit DecodeSpread(const Fleet* fleet) : fleet_(fleet) {}
  ~DecodeSpread();  // after Release
  DecodeSpread(const DecodeSpread&) = delete;
  DecodeSpread& operator=(const DecodeSpread&) = delete;

  // A slot for each part, on its device, or none and why. The parts outlive Release.
  absl::Status AcquireSlots(absl::Span<DecodePart* const> parts, cache::TenantId tenant);
  uint8_t* slot(size_t part) const { return slots_[part].bytes; }

  // Gives the parts, whose tensors are in their slots, to the engines. An error: none was taken,
  // retry_after_ms() goes with it, and nobody is told. A part that is refused while others are
  // taken fails with its items alone.
  absl::Status Submit(const Sender& sender);
  // Once told: the status of the whole, with every item's in place.
  absl::Status Finish();
  int32_t retry_after_ms() const { return retry_after_ms_; }

  void Cancel();             // while parts are out
  void NoteReplies() const;  // Engine::NoteReply of each
  void Release();

 private:
  const Fleet* const fleet_;
  absl::Span<DecodePart* const> parts_;
  std::vector<StagingSlot> slots_;  // [parts]
  Join join_;
  int32_t retry_after_ms_ = 0;
};

}  // namespace fp8kvd::engine
