// server/snapshot_keeper.h: when a run saves its sequences and when it restores another's, and what
// is said of it: the log, and numbers for Prometheus.
//
//   start   Open, Restore, then the doors; Served once they are open
//   start that fails with the doors shut   GiveBack
//   drain   Save, once nothing is in flight. Never after a device fault.
//
// Does not manage: files (snapshot_folder.h), what is in them (server/engine/snapshot.h).
// Threads: one; stats from any.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/status/statusor.h"

#include "config/options.h"
#include "server/engine/clock.h"
#include "server/engine/fleet.h"
#include "server/ops/metrics.h"
#include "server/snapshot_folder.h"

namespace fp8kvd {

class SnapshotKeeper {
 public:
  // snapshot_dir is given. The folder's errors.
  static absl::StatusOr<std::unique_ptr<SnapshotKeeper>> Open(const config::DrainOptions& options,
                                                              const engine::Clock* clock);

  // What another run left, if it did. A snapshot that is refused costs its sequences and no more;
  // an error is a device's: the start ends, and GiveBack leaves the snapshot to the next.
  absl::Status Restore(engine::Fleet* fleet);
  void Served();
  void GiveBack();
  // False: there were sequences, and they are lost.
  bool Save(engine::Fleet* fleet);

  ops::SnapshotStats stats() const;

 private:
  SnapshotKeeper(const config::DrainOptions& options, const engine::Clock* clock,
                 std::unique_ptr<SnapshotFolder> folder)
      : options_(options), clock_(*clock), folder_(std::move(folder)) {}
  void Refuse(const absl::Status& why);

  const config::DrainOptions options_;
  const engine::Clock& clock_;
  const std::unique_ptr<SnapshotFolder> folder_;
  bool has_taken_ = false;  // and not yet settled
  mutable std::mutex mutex_;
  ops::SnapshotStats stats_;  // guarded by mutex_
};

}  // namespace fp8kvd
