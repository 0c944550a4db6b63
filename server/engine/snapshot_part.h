// server/engine/snapshot_part.h: what one device's sequences are in a snapshot: its store
// (cache/store_image.h), and the bytes of every page in use once, also where forks share it. Bytes
// are those of the device's own layout, so they restore bit for bit.
//
// Promises: Load gives a whole store whose pages are in place, or an error; then nothing has
//   changed but the bytes of pages that are free.
// Does not manage: what goes round the parts, and whether all of them may be taken over
//   (snapshot.h).
// Threads: with the store's one caller. Cost: pages pass through one staging slot; beside it a part
//   takes the memory of the store's numbers twice.
// Errors: of the sink or source; of snapshot_format.h; FAILED_PRECONDITION where models, tenants or
//   room differ, and says which; INVALID_ARGUMENT: what it says contradicts itself; the backend's.
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

struct SnapshotPart {
  cache::StoreImage image;
  int64_t pages = 0;
  int64_t bytes = 0;  // of pages
};

class SnapshotParts {
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
  static absl::StatusOr<std::unique_ptr<SnapshotParts>> Make(const Setup& setup);

  const std::vector<SnapshotFact>& facts() const { return facts_; }
  void NameAll(SnapshotHead* head) const;  // models and tenants

  SnapshotPart Of(const cache::SeqStore& store) const;
  absl::Status Save(const SnapshotPart& part, SnapshotWriter* writer) const;

  // options: of a new store; leases start at now_ms. *device: the same error where it is the
  // device's and not the snapshot's.
  absl::StatusOr<std::unique_ptr<cache::SeqStore>> Load(cache::StoreOptions options, int64_t now_ms,
                                                        const SnapshotHead& head,
                                                        SnapshotReader* reader,
                                                        absl::Status* device) const;

 private:
  // Bytes of a device's pool that follow each other.
  struct Run {
    uint8_t* at = nullptr;
    int64_t bytes = 0;
  };

  SnapshotParts(const Setup& setup, std::vector<SnapshotFact> facts)
      : setup_(setup), facts_(std::move(facts)) {}
  std::vector<Run> RunsOf(int32_t model, int32_t group,
                          const std::vector<cache::PageId>& page_ids) const;
  absl::Status SavePool(const std::vector<Run>& runs, absl::Span<uint8_t> buffer,
                        SnapshotWriter* writer) const;
  absl::Status LoadPool(Run run, absl::Span<uint8_t> buffer, SnapshotReader* reader,
                        absl::Status* device) const;
  absl::Status TakeNames(const SnapshotHead& head,
                         const std::vector<std::vector<uint64_t>>& page_counts,
                         cache::StoreImage* image) const;

  const Setup setup_;
  const std::vector<SnapshotFact> facts_;
};

}  // namespace fp8kvd::engine
