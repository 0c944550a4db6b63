// config/model.h: from a model's options to its shape as the other rooms see it, and to the pages
// that its pools need.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "config/base/geometry.h"
#include "config/options.h"

namespace fp8kvd::config {

// The model's shape, with its layers grouped: those of bf16_layers are bf16, all others are
// `precision`. Groups are in the order of their first layers. hf_config must have been imported
// before. INVALID_ARGUMENT names the model and says what is asked, what is allowed and what to do.
absl::StatusOr<ModelGeometry> MakeGeometry(const ModelOptions& options, Precision precision);

// Bytes of one (page, layer, KV head) block: kernels::Backend::BlockBytes of the device in use, or
// PlainBlockBytes before there is one.
using BlockBytesFn = std::function<int64_t(Precision precision, int32_t head_dim)>;
int64_t PlainBlockBytes(Precision precision, int32_t head_dim);

// The pool of one layer group.
struct GroupPool {
  int64_t pages_per_seq = 0;  // that a sequence of expected_tokens holds at most
  int64_t pages = 0;
  int64_t page_bytes = 0;
};

struct ModelPools {
  std::vector<GroupPool> groups;  // as ModelGeometry::groups
};

// Pools of all models; models[i] is geometries[i]. Sizes are expected_seqs x pages_per_seq each, or
// all of them scaled by one factor to fill pool_bytes or pool_fraction of bytes_free.
// INVALID_ARGUMENT when a pool would pass kPagesMax or could not hold one expected sequence.
absl::StatusOr<std::vector<ModelPools>> PlanPools(absl::Span<const ModelGeometry> geometries,
                                                  absl::Span<const ModelOptions> models,
                                                  const CacheOptions& cache, int64_t bytes_free,
                                                  const BlockBytesFn& block_bytes);

}  // namespace fp8kvd::config
