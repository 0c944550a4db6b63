// config/base/geometry.h: the shape of a model as every room of the daemon sees it: layers, heads,
// layer groups. Plain data; config/ builds and checks it (MakeGeometry in config/model.h), after
// which every field is within limits.h and nobody checks again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "config/base/limits.h"

namespace fp8kvd {

// How a layer group stores K and V.
enum class Precision : uint8_t {
  kBf16 = 0,   // the rows as they came
  kFp8Kv = 1,  // e4m3 codes and one fp32 scale per (token, KV head)
};

// Bytes that the cache needs for K and V of one (token, KV head) together, scales included.
constexpr int64_t KvBytesPerToken(Precision precision, int32_t head_dim) {
  return precision == Precision::kFp8Kv ? int64_t{2} * head_dim + 8 : int64_t{4} * head_dim;
}

// Pages that a sequence of `tokens` tokens holds in a layer group at most: config/ sizes pools by
// it, cache/ reserves by it. A window's slowest layer keeps window + slack tokens behind it, and no
// layer runs more than window + slack ahead of it: twice that, and a page more where a page is cut.
constexpr int64_t SeqPagesMax(int64_t tokens, int64_t window, int64_t slack,
                              int64_t page_tokens = kPageTokens) {
  const int64_t all = (tokens + page_tokens - 1) / page_tokens;
  if (window == 0) return all;
  return std::min(all, (2 * (window + slack) + page_tokens - 1) / page_tokens + 1);
}
static_assert(SeqPagesMax(/*tokens=*/4096, /*window=*/0, /*slack=*/128) == 64);
static_assert(SeqPagesMax(/*tokens=*/4096, /*window=*/512, /*slack=*/128) == 21);
static_assert(SeqPagesMax(/*tokens=*/65, /*window=*/512, /*slack=*/128) == 2);

// One layer of a model.
struct LayerGeometry {
  int32_t window = 0;       // latest tokens seen, the query's own included; 0: all
  float softcap = 0.0F;     // c in c * tanh(x / c), after sm_scale; 0: off
  bool has_sinks = false;   // every Decode of this layer brings sink_logits [q_heads]
  int32_t group = 0;        // index into ModelGeometry::groups
  int32_t group_layer = 0;  // index of this layer within its group
};

// Layers of one model with equal kv_heads, head_dim, window and precision. It has its own page pool
// and its own block table per sequence.
struct LayerGroup {
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int32_t window = 0;
  Precision precision = Precision::kBf16;
  std::vector<int32_t> layers;  // model layers, ascending; position in it is group_layer

  // Bytes of one page without a kernel's padding: every layer and KV head, kPageTokens tokens.
  int64_t PageBytes() const {
    return KvBytesPerToken(precision, head_dim) * kPageTokens * kv_heads *
           static_cast<int64_t>(layers.size());
  }
};

struct ModelGeometry {
  std::string name;
  int32_t layers = 0;
  int32_t q_heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  float sm_scale = 0.0F;             // factor of q.k before softmax; never 0 here
  std::vector<LayerGeometry> layer;  // [layers]
  std::vector<LayerGroup> groups;

  int32_t group_size() const { return q_heads / kv_heads; }
};

}  // namespace fp8kvd
