// server/engine/engine_parts.h: what an Engine is made of. For engine.cc (the turn),
// engine_appends.cc (slices of bulk appends), engine_start.cc (how it is put together) and
// engine_snapshot.cc alone.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "cache/seq_store.h"
#include "config/base/check.h"
#include "config/options.h"
#include "kernels/backend.h"
#include "server/engine/admission.h"
#include "server/engine/answers.h"
#include "server/engine/append_rows.h"
#include "server/engine/append_step.h"
#include "server/engine/batcher.h"
#include "server/engine/coming_slices.h"
#include "server/engine/control_step.h"
#include "server/engine/decode_step.h"
#include "server/engine/doorbell.h"
#include "server/engine/engine.h"
#include "server/engine/freed_pages.h"
#include "server/engine/intake.h"
#include "server/engine/launches.h"
#include "server/engine/page_map.h"
#include "server/engine/snapshot_part.h"
#include "server/engine/turn.h"

namespace fp8kvd::engine {

// The store's half of them.
std::vector<cache::TenantLimits> LimitsOf(const std::vector<config::TenantOptions>& tenants);

// Who owns what, and the order of a turn; what a part does is said in its header.
class Engine::Parts {
 public:
  struct Setup {
    config::EngineOptions options;
    config::CacheOptions cache_options;
    std::vector<ModelSetup> models;
    uint64_t incarnation = 0;
    kernels::Backend* backend = nullptr;
    const Clock* clock = nullptr;
    std::vector<config::TenantOptions> tenants;  // one at least
    Seat seat;
  };

  static absl::StatusOr<std::unique_ptr<Parts>> Make(Setup setup);
  ~Parts() { FP8KVD_CHECK(admission_.places_used() == 0); }

  absl::Status Submit(Request* request);
  bool callers_take_turns() const { return callers_take_turns_; }
  void LookOn();
  void LookAway() { WakeThread(); }
  bool Step() { return TakeTurn().has_worked; }
  absl::Status Run();
  void Drain();
  void SetTenants(std::vector<config::TenantOptions> tenants);
  void NoteReply(const DecodeRequest& request);
  EngineStats stats() const;
  absl::Status PrepareSnapshots();
  const SnapshotParts& snapshots() const {
    FP8KVD_CHECK(snapshots_ != nullptr);
    return *snapshots_;
  }
  absl::StatusOr<SnapshotPart> TakePart() const;
  absl::StatusOr<std::unique_ptr<cache::SeqStore>> LoadPart(const SnapshotHead& head,
                                                            SnapshotReader* reader);
  absl::Status Adopt(std::unique_ptr<cache::SeqStore> store);
  uint64_t incarnation() const { return store_->options().incarnation; }
  Staging& staging() { return *staging_; }
  const Setup& setup() const { return setup_; }

 private:
  Parts(Setup setup, PageMap pages, std::unique_ptr<Staging> staging);
  cache::StoreOptions MakeStoreOptions();
  void MakeSteps(std::unique_ptr<cache::SeqStore> store);

  // What a turn left, for who took it.
  struct TurnEnd {
    bool was_taken = false;   // somebody else has it; the rest says nothing then
    bool has_worked = false;  // anything happened
    bool is_idle = false;     // nothing waits and nothing runs
    bool is_watched = false;  // one launch runs, of one sender that looks on, and nothing waits
    bool is_over = false;     // drained, or the device failed

    bool needs_thread() const { return is_over || (!is_idle && !is_watched); }
  };
  TurnEnd TakeTurn();
  void TakeTurns();
  void WakeThread();
  bool RunTurn();
  void TakeTenants();
  bool Work();
  bool MustGather(const Batcher::Pick& pick, TimeUs now) const;
  bool CanFillNext() const;
  bool FillsNext(const Batcher::Pick& pick) const;
  bool LaunchDecode(const Batcher::Pick& pick, TimeUs now);
  bool MoveAppends(AppendRequest* picked);
  bool HasArrived(const ComingSlice& slice);
  void SetOut(AppendRequest* append);
  void LaunchComing(TimeUs now);
  void EndComing();
  bool DropEnded();
  void RunControl(ControlRequest* request, TimeUs now);
  void EndLate(Request* request, TimeUs now);
  void Take(Launch& launch, TimeUs now);
  void PoisonFreed();
  bool Poll();
  void Land(const Launch& launch, TimeUs now);
  bool ExpireLeases(TimeUs now);
  void CloseIfDrained(TimeUs now);
  void Fail(const absl::Status& fault);
  void FailAtStart(const absl::Status& fault);
  bool is_idle() const { return batcher_.empty() && launches_.empty() && coming_.empty(); }
  bool is_watched() const;

  const Setup setup_;
  const bool callers_take_turns_;  // Submit takes the turn when it is free
  const PageMap pages_;
  const std::unique_ptr<Staging> staging_;
  Admission admission_;
  Doorbell doorbell_;
  SharedHistogram reply_us_;
  std::atomic<bool> is_wanted_{false};      // a caller's turn left work for the engine's thread
  std::atomic<bool> is_looking_on_{false};  // the engine's thread is awake and takes turn on turn
  std::mutex tenants_mutex_;
  std::vector<config::TenantOptions> new_tenants_;  // guarded by tenants_mutex_
  std::atomic<bool> has_new_tenants_{false};
  Turn turn_;
  // From here on all belongs to whoever holds the turn.
  FreedPages freed_;
  Batcher batcher_;
  Launches launches_;
  ComingSlices coming_;
  int64_t decodes_before_slice_ = 0;          // that left no place to one since the last
  TimeUs slices_from_ = 0;                    // none before, unless a decode is under way
  EngineStats stats_;                         // Answers publishes it
  std::unique_ptr<SnapshotParts> snapshots_;  // null: none are made or read
  std::unique_ptr<cache::SeqStore> store_;
  std::unique_ptr<AppendRows> append_rows_;
  std::unique_ptr<DecodeStep> decode_step_;
  std::unique_ptr<AppendStep> append_step_;
  std::unique_ptr<ControlStep> control_step_;
  std::unique_ptr<Answers> answers_;
  std::unique_ptr<Intake> intake_;

  std::vector<cache::SeqHandle> expired_;
  double item_us_ = 0.0;  // what an item costs, a moving average
  absl::Status fault_;
  bool is_drained_ = false;
};

}  // namespace fp8kvd::engine
