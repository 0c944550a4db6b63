// Sequences that outlive a run: when an engine may save them, and how it takes them over.
#include <memory>
#include <utility>

#include "server/engine/engine_parts.h"

namespace fp8kvd::engine {

absl::Status Engine::Parts::PrepareSnapshots() {
  absl::StatusOr<std::unique_ptr<SnapshotParts>> snapshots =
      SnapshotParts::Make({.models = setup_.models,
                           .cache_options = setup_.cache_options,
                           .tenants = setup_.tenants,
                           .backend = *setup_.backend,
                           .pages = pages_,
                           .staging = *staging_});
  if (!snapshots.ok()) return snapshots.status();
  snapshots_ = *std::move(snapshots);
  return absl::OkStatus();
}

absl::StatusOr<SnapshotPart> Engine::Parts::TakePart() const {
  if (!fault_.ok() || !is_drained_) {
    return absl::FailedPreconditionError(fault_.ok() ? "the engine has not drained"
                                                     : "the device has failed");
  }
  return snapshots_->Of(*store_);
}

absl::StatusOr<std::unique_ptr<cache::SeqStore>> Engine::Parts::LoadPart(const SnapshotHead& head,
                                                                         SnapshotReader* reader) {
  FP8KVD_CHECK(store_->seqs_used() == 0);
  absl::Status device;
  auto store =
      snapshots_->Load(MakeStoreOptions(), setup_.clock->NowUs() / 1000, head, reader, &device);
  if (!device.ok()) FailAtStart(device);
  return store;
}

absl::Status Engine::Parts::Adopt(std::unique_ptr<cache::SeqStore> store) {
  MakeSteps(std::move(store));
  for (int32_t i = 0; i < setup_.cache_options.seqs_max; ++i) {
    const auto seq = static_cast<cache::SeqIndex>(i);
    if (!store_->Occupied(seq)) continue;
    if (absl::Status status = control_step_->FillTables(seq); !status.ok()) {
      FailAtStart(status);
      return status;
    }
  }
  return absl::OkStatus();
}

void Engine::Parts::FailAtStart(const absl::Status& fault) {
  Fail(fault);
  answers_->Tell();  // no turn will
}

}  // namespace fp8kvd::engine
