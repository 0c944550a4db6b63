// server/engine/engine.h: what mutates the store and queues byte work, one turn at a time. It
// batches what waits, plans with cache/, launches with kernels/, and answers calls.
//
// Promises: every request that Submit took is answered exactly once, also when it was cancelled,
//   came too late, the device failed or the engine drains. Items of one (sequence, layer) run in
//   the order of their Submit. Each launch takes every eligible item that waits when the device
//   becomes free, within bounds (batcher.h). No tensor byte is touched, no memory is taken on the
//   decode path once Start returned.
// Does not manage: message bytes, sockets (server/rpc); when a process ends (server/daemon).
// Threads: Submit, Step and stats from any thread, Run on one. A turn is one thread's at a time
//   (turn.h). Where the device returns at once (kernels/backend.h), Submit of anything but a bulk
//   append takes the turn if it is free, and Run's thread does what is left; else only Run's thread
//   takes turns.
// Errors: Submit gives RESOURCE_EXHAUSTED with the request's retry_after_ms set (the queue is
//   full), UNAVAILABLE (draining, or the device failed).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "config/options.h"
#include "kernels/backend.h"
#include "server/engine/clock.h"
#include "server/engine/messages.h"
#include "server/engine/model_setup.h"
#include "server/engine/snapshot_part.h"
#include "server/engine/staging.h"
#include "server/engine/stats.h"

namespace fp8kvd::engine {

struct TenantQueues;

// Where an engine stands among those of one daemon (fleet.h).
struct Seat {
  uint32_t home = 0;                               // in its handles
  std::shared_ptr<TenantQueues> queues = nullptr;  // that all of them share; null: its own
};

class Engine {
 public:
  // Takes all memory, warms every kernel shape. `backend` and `clock` outlive the engine. tenants:
  // by id, each bound given (config/security.h); empty: one, which may have everything.
  static absl::StatusOr<std::unique_ptr<Engine>> Start(
      const config::EngineOptions& options, const config::CacheOptions& cache_options,
      std::vector<ModelSetup> models, uint64_t incarnation, kernels::Backend* backend,
      const Clock* clock, std::vector<config::TenantOptions> tenants = {}, Seat seat = {});
  ~Engine();  // every request taken must have been answered: Drain and Run first
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Takes the request or says why not (then nothing of it is kept). It must live until Done(),
  // which may come before this returns. Never waits for the device or for another thread.
  absl::Status Submit(Request* request);

  // Slots for tensors in staging memory; thread-safe.
  Staging& staging();

  // Whether senders take turns, and may look on: the device returns at once.
  bool callers_take_turns() const;
  // A turn for a sender that looks on: it sees the end of its launch with no thread in between.
  // Nothing where the engine's thread takes the turns, or looks on itself: it does whenever
  // anything else is under way.
  void LookOn();
  // A sender that looked on does so no more, though its request is not answered.
  void LookAway();

  // One turn: takes what waits, launches if the device is free, answers what is finished, expires
  // leases. True if anything happened; false also where another thread has the turn. Never waits.
  bool Step();

  // Turns until Drain is complete (OK) or the device failed (that Status), spinning briefly and
  // then sleeping when idle; Submit wakes it.
  absl::Status Run();

  // From any thread: what each tenant may have from the next turn on; as many as at Start.
  void SetTenants(std::vector<config::TenantOptions> tenants);

  // From any thread: an answered request's reply is made, and leaves.
  void NoteReply(const DecodeRequest& request);

  // From any thread: refuse new work with UNAVAILABLE, finish what was taken, then Run returns.
  void Drain();

  // This device's part of a snapshot, for snapshot.h alone: all on one thread, with no turn beside
  // them.
  absl::Status PrepareSnapshots();         // first, and before the daemon is ready
  const SnapshotParts& snapshots() const;  // from then on
  // After Run has returned OK. FAILED_PRECONDITION: it has not, or the device failed.
  absl::StatusOr<SnapshotPart> TakePart() const;
  // Before the first Submit: another run's sequences as a store, and then taken over, with their
  // incarnation. After an error of the device the engine has failed; after any other it is as it
  // was, with none.
  absl::StatusOr<std::unique_ptr<cache::SeqStore>> LoadPart(const SnapshotHead& head,
                                                            SnapshotReader* reader);
  absl::Status Adopt(std::unique_ptr<cache::SeqStore> store);

  // The slice_tokens of an AppendRequest for these layers: see append_step.h.
  int32_t AppendSliceTokens(int32_t model, int32_t layer, int32_t layers_count) const;

  // A copy of all counters, consistent with each other.
  EngineStats stats() const;

  // As given to Start.
  const std::vector<ModelSetup>& models() const;
  const config::CacheOptions& cache_options() const;
  uint64_t incarnation() const;  // a restored one from Restore on

 private:
  class Parts;
  explicit Engine(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace fp8kvd::engine
