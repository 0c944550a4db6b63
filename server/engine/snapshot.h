// server/engine/snapshot.h: what the sequences of one run are, on all its devices, written for the
// next run and read by it: a part for each device (snapshot_part.h), restored to the device of the
// same number, which handles name.
//
// Promises: Restore takes over every part or none. So a snapshot of another number of devices is
//   refused: what stands on one device names pages, forks and handles of that device alone.
// Does not manage: files, renames, deadlines (a SnapshotSink or Source of the daemon's); when it is
//   right to save: after a drain, never after a device fault (engine.h).
// Threads: one, with no engine's turn beside it. Cost: as its parts; Save and Restore hold the
//   numbers of all devices.
// Errors: of the sink or source; DATA_LOSS and FAILED_PRECONDITION as snapshot_format.h; the latter
//   also where devices, models, tenants or room differ, and says which; INVALID_ARGUMENT: what it
//   says contradicts itself. Where a device fails its engine has failed, too (EngineStats::failed):
//   the snapshot may be as good as ever.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

#include "server/engine/fleet.h"
#include "server/engine/snapshot_format.h"

namespace fp8kvd::engine {

// What a snapshot is, for a log.
struct SnapshotInfo {
  std::string version;  // of the fp8kvd that wrote it
  int64_t unix_ms = 0;  // when
  int64_t seqs = 0;
  int64_t pages = 0;
  int64_t bytes = 0;  // of pages
};

// Before the rest: takes some kilobytes of each device, so before the daemon is ready.
absl::Status PrepareSnapshots(Fleet* fleet);

// After every engine's Run has returned OK. version and unix_ms of info are given, the rest is
// filled in.
absl::Status SaveSnapshot(Fleet* fleet, SnapshotSink* sink, SnapshotInfo* info);

// Before the first Submit: takes over another run's sequences and its incarnation. After an error
// the engines are as they were, with none, or a device failed.
absl::Status RestoreSnapshot(Fleet* fleet, SnapshotSource* source, SnapshotInfo* info);

}  // namespace fp8kvd::engine
