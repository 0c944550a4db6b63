#include "server/snapshot_keeper.h"

#include <string>
#include <utility>

#include "spdlog/spdlog.h"

#include "server/engine/snapshot.h"
#include "server/unix_ms.h"
#include "server/version.h"

namespace fp8kvd {
namespace {

std::string Text(const absl::Status& status) { return std::string(status.message()); }

void WarnOf(const absl::Status& status) {
  if (!status.ok()) spdlog::warn("{}", Text(status));
}

}  // namespace

absl::StatusOr<std::unique_ptr<SnapshotKeeper>> SnapshotKeeper::Open(
    const config::DrainOptions& options, const engine::Clock* clock) {
  absl::StatusOr<std::unique_ptr<SnapshotFolder>> folder =
      SnapshotFolder::Open(options.snapshot_dir);
  if (!folder.ok()) return folder.status();
  if (!(*folder)->removed().empty()) {
    spdlog::warn("snapshot_dir: removed {}, which a daemon left that died over it",
                 (*folder)->removed());
  }
  return std::unique_ptr<SnapshotKeeper>(new SnapshotKeeper(options, clock, *std::move(folder)));
}

absl::Status SnapshotKeeper::Restore(engine::Fleet* fleet) {
  if (absl::Status status = engine::PrepareSnapshots(fleet); !status.ok()) return status;
  const int64_t begun_us = clock_.NowUs();
  absl::StatusOr<std::unique_ptr<engine::SnapshotSource>> source = folder_->Take();
  if (!source.ok()) {
    Refuse(source.status());
    return absl::OkStatus();
  }
  if (*source == nullptr) {
    spdlog::info("no snapshot in {}: no sequences from before", options_.snapshot_dir);
    return absl::OkStatus();
  }
  engine::SnapshotInfo info;
  const absl::Status restored = engine::RestoreSnapshot(fleet, source->get(), &info);
  has_taken_ = restored.ok() || fleet->stats().failed;
  if (!restored.ok() && has_taken_) return restored;
  if (!restored.ok()) {
    Refuse(restored);
    return absl::OkStatus();
  }
  const int64_t took_us = clock_.NowUs() - begun_us;
  spdlog::info(
      "restored {} sequences, {} pages ({:.1f} MiB) in {} ms, which fp8kvd {} saved {} s ago; "
      "their leases start now",
      info.seqs, info.pages, static_cast<double>(info.bytes) / (1 << 20), took_us / 1000,
      info.version, (UnixMs() - info.unix_ms) / 1000);
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.restored = {.seqs = info.seqs, .bytes = info.bytes, .took_us = took_us};
  return absl::OkStatus();
}

void SnapshotKeeper::Refuse(const absl::Status& why) {
  spdlog::error("the snapshot {} is refused and none of its sequences is restored: {}",
                folder_->path(), Text(why));
  const absl::Status kept = folder_->Refuse();
  if (kept.ok()) {
    spdlog::error(
        "it is kept as {0}.refused; once the reason is gone, stop, rename it to {0}, start",
        folder_->path());
  } else {
    WarnOf(kept);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.is_refused = true;
}

void SnapshotKeeper::Served() {
  if (std::exchange(has_taken_, false)) WarnOf(folder_->Drop());
}

void SnapshotKeeper::GiveBack() {
  if (std::exchange(has_taken_, false)) WarnOf(folder_->GiveBack());
}

bool SnapshotKeeper::Save(engine::Fleet* fleet) {
  Served();
  if (fleet->stats().seqs == 0) {
    spdlog::info("no sequences to save");
    return true;
  }
  engine::SnapshotInfo info{.version = kVersion, .unix_ms = UnixMs()};
  const int64_t begun_us = clock_.NowUs();
  const absl::Status saved = folder_->Save(
      clock_, options_.snapshot_ms_max,
      [&](engine::SnapshotSink* sink) { return engine::SaveSnapshot(fleet, sink, &info); });
  const int64_t took_us = clock_.NowUs() - begun_us;
  if (!saved.ok()) {
    spdlog::error("the sequences are not saved, their handles will be NOT_FOUND: {}", Text(saved));
    return false;
  }
  spdlog::info("saved {} sequences, {} pages ({:.1f} MiB) in {} ms to {}", info.seqs, info.pages,
               static_cast<double>(info.bytes) / (1 << 20), took_us / 1000, folder_->path());
  return true;
}

ops::SnapshotStats SnapshotKeeper::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  ops::SnapshotStats stats = stats_;
  stats.written_bytes = folder_->bytes_written();
  return stats;
}

}  // namespace fp8kvd
