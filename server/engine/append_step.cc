#include "server/engine/append_step.h"

#include <algorithm>

#include "config/base/limits.h"

namespace fp8kvd::engine {

int32_t AppendSliceTokens(const config::EngineOptions& options, int32_t kv_heads,
                          int32_t head_dim) {
  const int64_t token_bytes = int64_t{2} * 2 * kv_heads * head_dim;  // K and V, bf16
  return static_cast<int32_t>(
      std::clamp<int64_t>(options.append_slice_bytes_max / token_bytes, 1, kSeqLenMax));
}

}  // namespace fp8kvd::engine
