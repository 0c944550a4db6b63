// server/engine/append_step.h: a bulk append in slices.
#pragma once

#include <cstdint>

#include "config/options.h"

namespace fp8kvd::engine {

// Tokens of one layer that a slice takes: as many as fit append_slice_bytes_max of K and V, at
// least one. Callers digest their rows by the same slices. kv_heads, head_dim: of the layer.
int32_t AppendSliceTokens(const config::EngineOptions& options, int32_t kv_heads, int32_t head_dim);

}  // namespace fp8kvd::engine
