// server/engine/fleet.h: the engines of all devices of a daemon, seen as one: which of them a
// sequence is on, where new ones go, what they count together.
//
// Promises: a handle tells its device (home), so that a call finds its engine without a lock or a
//   look-up. New sequences go where most room is (placement.h). Bounds on sequences, of the daemon
//   and of tenants, hold for all devices together; with one device its store alone holds them.
// Does not manage: a call's parts and how they join (spread.h); threads of engines (server/).
// Threads: any. Cost: Of and DeviceOf read; Place and TakeSeqs take a mutex and copy the engines'
//   counters: they are for creating and forking.
// Errors: RESOURCE_EXHAUSTED from TakeSeqs.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "cache/ids.h"
#include "config/options.h"
#include "server/engine/engine.h"
#include "server/engine/placement.h"
#include "server/engine/stats.h"

namespace fp8kvd::engine {

class Fleet {
 public:
  // One engine at least, of equal options and models; the one at i has home i. They outlive the
  // fleet. tenants: as given to them.
  explicit Fleet(std::vector<Engine*> engines, std::vector<config::TenantOptions> tenants = {});
  Fleet(const Fleet&) = delete;
  Fleet& operator=(const Fleet&) = delete;

  int32_t devices() const { return static_cast<int32_t>(engines_.size()); }
  Engine& Of(int32_t device) const { return *engines_[static_cast<size_t>(device)]; }
  // Where a handle's sequence is. One of no device of ours is for the first to refuse.
  int32_t DeviceOf(const cache::SeqHandle& handle) const {
    return handle.home < engines_.size() ? static_cast<int32_t>(handle.home) : 0;
  }

  // Counters of each device, and of all together: sums, but for what devices share.
  std::vector<EngineStats> device_stats() const;
  EngineStats stats() const;

  void Drain();
  void SetTenants(std::vector<config::TenantOptions> tenants);

  // Devices for new sequences that are still to be made; of devices that are out it takes none, and
  // gives fewer than `count` only where all are. Every device counts as fuller by what was placed
  // there until Placed says that the engine has answered.
  struct Placing {
    int32_t model = 0;
    int64_t expected_tokens = 0;
    std::vector<int32_t> devices;
  };
  Placing Place(int32_t model, int64_t expected_tokens, int32_t count,
                absl::Span<const int32_t> out);
  void Placed(const Placing& placing);

  // Before sequences are made: takes their places among what all devices may have; back with
  // GiveBackSeqs once the engines have answered, whatever they said.
  absl::Status TakeSeqs(cache::TenantId tenant, int64_t count);
  void GiveBackSeqs(cache::TenantId tenant, int64_t count);

 private:
  // Placed and not yet seen in an engine's counters.
  struct Pending {
    std::vector<int64_t> seqs;                // [models]
    std::vector<std::vector<int64_t>> pages;  // [models][groups]
  };
  std::vector<SeqPages> PagesOf(int32_t model, int64_t expected_tokens) const;
  void AddPending(const Placing& placing, int64_t sign);  // with mutex_

  const std::vector<Engine*> engines_;
  std::mutex mutex_;  // all below
  std::vector<config::TenantOptions> tenants_;
  std::vector<Pending> pending_;         // [devices]
  std::vector<int64_t> pending_tenant_;  // [tenants] sequences
  int64_t pending_all_ = 0;
};

}  // namespace fp8kvd::engine
