// server/engine/snapshot.h: what the sequences of one run are, written for the next run and read by
// it: the store (cache/store_image.h), and the bytes of every page in use once, also where forks
// share it. Bytes are those of the device's own layout, so they restore bit for bit.
//
// Promises: Load gives a whole store whose pages are in place, or an error; then nothing has
//   changed but the bytes of pages that are free.
// Does not manage: files, renames, deadlines (a SnapshotSink or Source of the daemon's); when it is
//   right to save: after a drain, never after a device fault (engine.h).
// Threads: with the store's one caller. Cost: pages pass through one staging slot; beside it Save
//   and Load take the memory of the store's numbers twice.
// Errors: of the sink or source; DATA_LOSS and FAILED_PRECONDITION as snapshot_format.h; the latter
//   also where models, tenants or room differ, and says which; INVALID_ARGUMENT: what it says
//   contradicts itself; the backend's.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "cache/seq_store.h"
#include "config/options.h"
#include "kernels/backend.h"
#include "server/engine/model_setup.h"
#include "server/engine/page_map.h"
#include "server/engine/snapshot_format.h"
#include "server/engine/staging.h"

namespace fp8kvd::engine {

// What a snapshot is, for a log.
struct SnapshotInfo {
  std::string version;  // of the fp8kvd that wrote it
  int64_t unix_ms = 0;  // when
  int64_t seqs = 0;
  int64_t pages = 0;
  int64_t bytes = 0;  // of pages
};

class Snapshots {
 public:
  struct Setup {
    const std::vector<ModelSetup>& models;
    const config::CacheOptions& cache_options;
    const std::vector<config::TenantOptions>& tenants;
    kernels::Backend& backend;
    const PageMap& pages;
    Staging& staging;
  };

  // Before the daemon is ready: snapshot_facts.h takes memory. All outlive it.
  static absl::StatusOr<std::unique_ptr<Snapshots>> Make(const Setup& setup);

  // version and unix_ms of info are given, the rest is filled in.
  absl::Status Save(const cache::SeqStore& store, SnapshotSink* sink, SnapshotInfo* info) const;

  // options: of a new store; leases start at now_ms.
  absl::StatusOr<std::unique_ptr<cache::SeqStore>> Load(cache::StoreOptions options, int64_t now_ms,
                                                        SnapshotSource* source,
                                                        SnapshotInfo* info) const;

 private:
  // Bytes of a device's pool that follow each other.
  struct Run {
    uint8_t* at = nullptr;
    int64_t bytes = 0;
  };

  Snapshots(const Setup& setup, std::vector<SnapshotFact> facts)
      : setup_(setup), facts_(std::move(facts)) {}
  std::vector<Run> RunsOf(int32_t model, int32_t group,
                          const std::vector<cache::PageId>& page_ids) const;
  absl::Status SavePool(const std::vector<Run>& runs, absl::Span<uint8_t> buffer,
                        SnapshotWriter* writer) const;
  absl::Status LoadPool(Run run, absl::Span<uint8_t> buffer, SnapshotReader* reader) const;
  absl::Status TakeNames(const SnapshotHead& head,
                         const std::vector<std::vector<uint64_t>>& page_counts,
                         cache::StoreImage* image) const;

  const Setup setup_;
  const std::vector<SnapshotFact> facts_;
};

}  // namespace fp8kvd::engine
