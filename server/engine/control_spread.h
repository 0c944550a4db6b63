// server/engine/control_spread.h: a request without tensors, for a daemon of several devices: its
// handles go to the engines that have their sequences, and the answers come back in its order.
//
// Promises: a request of one device goes to that engine as it is, which tells the call itself.
//   Create places its sequences, all or none: where a device turns out to have no room the others
//   are asked for the rest, and where that does not help what was made is freed again. Fork goes to
//   the parent's device. List goes from one device to the next. Of the others a device that takes
//   none of its part fails those handles alone.
// Rounds: each ends with the sender's Done, after which GoOn says whether it was the last. A
//   request takes at most as many as there are devices, and one to free what was made.
// Threads: one, the call's; but Done, which turns of the engines call.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"

#include "server/engine/fleet.h"
#include "server/engine/messages.h"
#include "server/engine/spread.h"

namespace fp8kvd::engine {

class ControlSpread {
 public:
  explicit ControlSpread(Fleet* fleet);
  ~ControlSpread();
  ControlSpread(const ControlSpread&) = delete;
  ControlSpread& operator=(const ControlSpread&) = delete;

  // `whole` is as for Engine::Submit, but for what the sender has; it lives until the last round.
  // An error: nothing was taken, whole->retry_after_ms goes with it, and nobody is told.
  absl::Status Submit(ControlRequest* whole, const Sender& sender);
  // After each Done. False: `whole` has its answer.
  bool GoOn();
  // While a round is out.
  void Cancel();

 private:
  enum class Step : uint8_t { kWhole, kEach, kCreate, kUndo, kList };
  struct Part;

  bool CanPlace(const ControlRequest& request) const;
  bool Round();  // false: nothing was taken, every part has its status
  Part& AddPart(int32_t device, ControlRequest::Op op);
  Part& PartOf(int32_t device, ControlRequest::Op op);
  absl::Status SubmitWhole(int32_t device);
  // What the next round sends. NextX: false where there is none, and `whole` has its answer.
  void SplitByDevice();
  void SplitCreate();
  void SplitList();
  bool NextOfCreate();
  bool NextOfList();
  void JoinEach();
  bool Undo(const absl::Status& why, int32_t retry_after_ms);
  bool Finish(const absl::Status& status, int32_t retry_after_ms);  // false, always

  Fleet* const fleet_;
  ControlRequest* whole_ = nullptr;
  Sender sender_;
  Step step_ = Step::kWhole;
  Join join_;
  std::vector<std::unique_ptr<Part>> parts_;
  int64_t seqs_taken_ = 0;  // of the fleet's bounds
  // Of a create.
  Fleet::Placing placing_;
  std::vector<cache::SeqHandle> made_;  // [count], generation 0: not yet
  std::vector<int32_t> full_;           // devices without room
  absl::Status failure_;
  int32_t failure_retry_ms_ = 0;
  // Of a list.
  int32_t list_device_ = 0;
  uint64_t list_after_ = 0;  // there
};

}  // namespace fp8kvd::engine
