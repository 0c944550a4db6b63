// server/engine/watch.h: the engines that a thread looks on while decodes which it sent there are
// under way: it takes their turns itself, and their own threads need not wake (engine.h).
//
// Does not manage: how long the thread looks (whoever owns it); the requests' looks_on, which their
//   sender sets.
// Threads: one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

#include "server/engine/fleet.h"
#include "server/engine/messages.h"

namespace fp8kvd::engine {

class Watch {
 public:
  // No fleet, or one whose devices work inside the call: there is never anything to look for.
  explicit Watch(const Fleet* fleet)
      : fleet_(fleet), may_look_on_(fleet != nullptr && fleet->Of(0).callers_take_turns()) {
    if (may_look_on_) decodes_.resize(static_cast<size_t>(fleet->devices()));
  }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  bool may_look_on() const { return may_look_on_; }
  bool empty() const { return decodes_count_ == 0; }

  // Before the parts of a decode are submitted, and once it is answered.
  void Begin(absl::Span<DecodePart* const> parts) { Count(parts, 1); }
  void End(absl::Span<DecodePart* const> parts) { Count(parts, -1); }

  // A turn of each engine that has such a decode.
  void LookOn() const {
    for (size_t device = 0; !empty() && device < decodes_.size(); ++device) {
      if (decodes_[device] > 0) fleet_->Of(static_cast<int32_t>(device)).LookOn();
    }
  }
  // The thread looks on no more, or not for now: their own threads have to.
  void LookAway() const {
    for (size_t device = 0; !empty() && device < decodes_.size(); ++device) {
      if (decodes_[device] > 0) fleet_->Of(static_cast<int32_t>(device)).LookAway();
    }
  }

 private:
  void Count(absl::Span<DecodePart* const> parts, int32_t change) {
    if (!may_look_on_) return;
    for (const DecodePart* const part : parts) {
      decodes_[static_cast<size_t>(part->device)] += change;
      decodes_count_ += change;
    }
  }

  const Fleet* const fleet_;
  const bool may_look_on_;
  std::vector<int32_t> decodes_;  // [devices] parts of decodes under way
  int32_t decodes_count_ = 0;     // of all devices
};

}  // namespace fp8kvd::engine
