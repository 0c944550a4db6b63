// Sequences that outlive a run: when an engine may save them, and how it takes them over.
#include <memory>
#include <utility>

#include "server/engine/engine_parts.h"

namespace fp8kvd::engine {

absl::Status Engine::Parts::PrepareSnapshots() {
  absl::StatusOr<std::unique_ptr<Snapshots>> snapshots =
      Snapshots::Make({.models = setup_.models,
                       .cache_options = setup_.cache_options,
                       .tenants = setup_.tenants,
                       .backend = *setup_.backend,
                       .pages = pages_,
                       .staging = *staging_});
  if (!snapshots.ok()) return snapshots.status();
  snapshots_ = *std::move(snapshots);
  return absl::OkStatus();
}

absl::Status Engine::Parts::Restore(SnapshotSource* source, SnapshotInfo* info) {
  FP8KVD_CHECK(snapshots_ != nullptr && store_->seqs_used() == 0);
  absl::StatusOr<std::unique_ptr<cache::SeqStore>> store =
      snapshots_->Load(MakeStoreOptions(), setup_.clock->NowUs() / 1000, source, info);
  if (!store.ok()) return store.status();
  MakeSteps(*std::move(store));
  for (int32_t i = 0; i < setup_.cache_options.seqs_max; ++i) {
    const auto seq = static_cast<cache::SeqIndex>(i);
    if (!store_->Occupied(seq)) continue;
    if (absl::Status status = control_step_->FillTables(seq); !status.ok()) {
      Fail(status);
      return status;
    }
  }
  return absl::OkStatus();
}

absl::Status Engine::Parts::Save(SnapshotSink* sink, SnapshotInfo* info) {
  FP8KVD_CHECK(snapshots_ != nullptr);
  if (!fault_.ok() || !is_drained_) {
    return absl::FailedPreconditionError(fault_.ok() ? "the engine has not drained"
                                                     : "the device has failed");
  }
  return snapshots_->Save(*store_, sink, info);
}

}  // namespace fp8kvd::engine
