// server/engine/snapshot_facts.h: what must be the same where a snapshot is restored, as names and
// values, so that a refusal says what differs: shapes, layer groups and precisions of the models,
// tokens of a page, and how the device lays a page out.
//
// The layout is not a number that somebody has to remember to raise: rows that never change are
// appended to a page of the device's own, and what the page then holds is hashed. So a kernel that
// lays pages out otherwise, or rounds otherwise, gives other facts.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "config/options.h"
#include "kernels/backend.h"
#include "server/engine/model_setup.h"
#include "server/engine/snapshot_format.h"

namespace fp8kvd::engine {

// Before the daemon is ready: takes a page for each layout from the device, and staging memory.
absl::StatusOr<std::vector<SnapshotFact>> MakeFacts(const std::vector<ModelSetup>& models,
                                                    const config::CacheOptions& options,
                                                    kernels::Backend* backend);

// FAILED_PRECONDITION names the first of the saved facts that is otherwise or unknown here. Models
// that are here alone do not matter.
absl::Status CompareFacts(const std::vector<SnapshotFact>& saved,
                          const std::vector<SnapshotFact>& here);

}  // namespace fp8kvd::engine
