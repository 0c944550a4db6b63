// server/snapshot_folder.h: the folder of --snapshot_dir, where a run leaves its snapshot for the
// next one. One file, fp8kvd.snapshot, mode 0600; what is in it is server/engine/snapshot.h's.
//
// Promises: a snapshot is loaded once, since Take renames it before it is read. One is there whole
//   or not at all: it is written under another name, reaches the disk, and gets its own name last.
//   One living daemon has the folder, by a lock on fp8kvd.lock that goes with the process. What a
//   daemon that died left of a snapshot is never loaded, and removed at the next Open.
// Names: fp8kvd.snapshot.part is being written, .taken is being loaded, .refused is what could not
//   be loaded, for people to look at.
// Does not manage: when (snapshot_keeper.h).
// Threads: one at a time; bytes_written from any.
// Errors: say what to do; UNAVAILABLE for the folder and its files, DEADLINE_EXCEEDED for a Save
//   that took too long.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "server/engine/clock.h"
#include "server/engine/snapshot_format.h"

namespace fp8kvd {

class SnapshotFolder {
 public:
  // The folder must be there, ours to write, and no other daemon's.
  static absl::StatusOr<std::unique_ptr<SnapshotFolder>> Open(const std::string& path);
  ~SnapshotFolder();
  SnapshotFolder(const SnapshotFolder&) = delete;
  SnapshotFolder& operator=(const SnapshotFolder&) = delete;

  std::string path() const;  // of the snapshot
  // What Open removed: names of files that a daemon that died was busy with; or nothing.
  const std::string& removed() const { return removed_; }

  // Moves the snapshot out of the way of any other start, and opens it; null: there is none. Then
  // one of the three below. It must be a file of ours (or root's) that not everybody may write.
  absl::StatusOr<std::unique_ptr<engine::SnapshotSource>> Take();
  absl::Status Drop();      // it was loaded: the file goes
  absl::Status Refuse();    // it cannot be loaded: as .refused it stays
  absl::Status GiveBack();  // nobody was served after it was loaded: the next start may have it

  // `write` gives the sink a snapshot. If it fails, the disk does, or more than ms_max pass,
  // nothing is left of it.
  absl::Status Save(const engine::Clock& clock, int64_t ms_max,
                    const std::function<absl::Status(engine::SnapshotSink*)>& write);
  int64_t bytes_written() const { return bytes_written_.load(std::memory_order_relaxed); }

 private:
  SnapshotFolder(std::string path, int folder, int lock)
      : folder_path_(std::move(path)), folder_(folder), lock_(lock) {}
  absl::Status RenameTo(const char* from, const char* to);
  absl::Status Failed(const char* what, const char* name) const;
  void RemoveUnfinished();

  const std::string folder_path_;
  const int folder_;  // descriptors
  const int lock_;
  std::string removed_;
  std::atomic<int64_t> bytes_written_{0};
};

}  // namespace fp8kvd
