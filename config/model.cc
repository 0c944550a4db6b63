#include "config/model.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>

#include "absl/numeric/int128.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "config/base/check.h"
#include "config/layer_list.h"

namespace fp8kvd::config {
namespace {

constexpr float kSmScaleMax = 1024.0F;

std::string Label(const ModelOptions& options) {
  return absl::StrCat("model \"", absl::CEscape(options.name), "\": ");
}

template <typename... Parts>
absl::Status Invalid(const ModelOptions& options, const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(Label(options), parts...));
}

absl::Status CheckRange(const ModelOptions& options, const char* key, int64_t value, int64_t min,
                        int64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return Invalid(options, key, " is ", value, ", allowed is ", min, " to ", max,
                 "; give the model's own ", key);
}

absl::Status CheckHeads(const ModelOptions& options) {
  if (std::find(std::begin(kHeadDims), std::end(kHeadDims), options.head_dim) ==
      std::end(kHeadDims)) {
    return Invalid(options, "head_dim ", options.head_dim, " has no kernel; kernels exist for ",
                   absl::StrJoin(kHeadDims, ", "));
  }
  const int32_t group = options.q_heads / options.kv_heads;
  if (group * options.kv_heads != options.q_heads) {
    return Invalid(options, "q_heads ", options.q_heads, " is no multiple of kv_heads ",
                   options.kv_heads, "; each KV head serves the same number of query heads");
  }
  if (group > kGroupMax) {
    return Invalid(options, "q_heads / kv_heads is ", group, ", kernels exist for 1 to ", kGroupMax,
                   "; serve this model elsewhere");
  }
  if (!std::isfinite(options.sm_scale) || options.sm_scale < 0 || options.sm_scale > kSmScaleMax) {
    return Invalid(options, "sm_scale is ", options.sm_scale, ", allowed is above 0 to ",
                   kSmScaleMax, ", or 0 for 1/sqrt(head_dim)");
  }
  return absl::OkStatus();
}

absl::Status CheckShape(const ModelOptions& options) {
  for (const absl::Status& status :
       {CheckRange(options, "layers", options.layers, 1, kLayersMax),
        CheckRange(options, "q_heads", options.q_heads, 1, kQHeadsMax),
        CheckRange(options, "kv_heads", options.kv_heads, 1, kKvHeadsMax),
        CheckRange(options, "expected_seqs", options.expected_seqs, 1, kSeqsMax),
        CheckRange(options, "expected_tokens", options.expected_tokens, 1, kSeqLenMax)}) {
    if (!status.ok()) return status;
  }
  return CheckHeads(options);
}

absl::Status CheckLayer(const ModelOptions& options, const LayerGeometry& layer) {
  if (!std::isfinite(layer.softcap) || layer.softcap < 0) {
    return Invalid(options, "softcap is ", layer.softcap,
                   ", allowed is any positive number, or 0 for none");
  }
  return CheckRange(options, "window", layer.window, 0, kSeqLenMax);
}

// The layers' own window, softcap and sinks, rules applied.
absl::StatusOr<std::vector<LayerGeometry>> MakeLayers(const ModelOptions& options) {
  LayerGeometry base;
  base.window = options.window;
  base.softcap = options.softcap;
  base.has_sinks = options.has_sinks;
  std::vector<LayerGeometry> layers(options.layers, base);
  for (const LayerRule& rule : options.layer_rules) {
    const auto named = ParseLayerList(rule.layers, options.layers);
    if (!named.ok()) return Invalid(options, "layer_rules: ", named.status().message());
    for (const int32_t layer : *named) {
      layers[layer].window = rule.window.value_or(layers[layer].window);
      layers[layer].softcap = rule.softcap.value_or(layers[layer].softcap);
      layers[layer].has_sinks = rule.has_sinks.value_or(layers[layer].has_sinks);
    }
  }
  for (const LayerGeometry& layer : layers) {
    if (const absl::Status status = CheckLayer(options, layer); !status.ok()) return status;
  }
  return layers;
}

// Puts `layer` into the group that it equals, or into a new one.
void PlaceLayer(int32_t layer, Precision precision, ModelGeometry* geometry) {
  LayerGeometry& placed = geometry->layer[layer];
  auto group = std::find_if(
      geometry->groups.begin(), geometry->groups.end(),
      [&](const LayerGroup& g) { return g.window == placed.window && g.precision == precision; });
  if (group == geometry->groups.end()) {
    LayerGroup made;
    made.kv_heads = geometry->kv_heads;
    made.head_dim = geometry->head_dim;
    made.window = placed.window;
    made.precision = precision;
    group = geometry->groups.insert(geometry->groups.end(), std::move(made));
  }
  placed.group = static_cast<int32_t>(group - geometry->groups.begin());
  placed.group_layer = static_cast<int32_t>(group->layers.size());
  group->layers.push_back(layer);
}

absl::StatusOr<GroupPool> NeededPool(const ModelOptions& options, const LayerGroup& group,
                                     const CacheOptions& cache, const BlockBytesFn& block_bytes) {
  GroupPool pool;
  pool.page_bytes = block_bytes(group.precision, group.head_dim) * group.kv_heads *
                    static_cast<int64_t>(group.layers.size());
  pool.pages_per_seq =
      SeqPagesMax(options.expected_tokens, group.window, cache.reclaim_slack_tokens);
  pool.pages = pool.pages_per_seq * options.expected_seqs;
  if (pool.pages > kPagesMax && cache.pool_bytes == 0 && cache.pool_fraction == 0) {
    return Invalid(options, "expected_seqs ", options.expected_seqs, " x ", pool.pages_per_seq,
                   " pages is ", pool.pages, " pages in one pool, allowed is ", kPagesMax,
                   "; lower expected_seqs or expected_tokens");
  }
  return pool;
}

// Scales every pool by bytes / needed.
absl::Status ScalePools(absl::Span<const ModelOptions> models, int64_t bytes, int64_t needed,
                        std::vector<ModelPools>* pools) {
  for (size_t m = 0; m < pools->size(); ++m) {
    for (GroupPool& pool : (*pools)[m].groups) {
      FP8KVD_CHECK(needed > 0);  // this pool is part of it
      const absl::uint128 pages = absl::uint128(pool.pages) * bytes / needed;
      pool.pages = static_cast<int64_t>(std::min<absl::uint128>(pages, kPagesMax));
      if (pool.pages < pool.pages_per_seq) {
        return Invalid(models[m], "its pool gets ", pool.pages, " pages of the ", bytes,
                       " bytes of all pools, one sequence of expected_tokens needs ",
                       pool.pages_per_seq, "; raise pool_bytes or pool_fraction, or lower ",
                       "expected_tokens or the expected_seqs of other models");
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelGeometry> MakeGeometry(const ModelOptions& options, Precision precision) {
  if (const absl::Status status = CheckShape(options); !status.ok()) return status;
  ModelGeometry geometry;
  geometry.name = options.name;
  geometry.layers = options.layers;
  geometry.q_heads = options.q_heads;
  geometry.kv_heads = options.kv_heads;
  geometry.head_dim = options.head_dim;
  geometry.sm_scale = options.sm_scale > 0
                          ? options.sm_scale
                          : static_cast<float>(1.0 / std::sqrt(double{1} * options.head_dim));
  auto layers = MakeLayers(options);
  if (!layers.ok()) return layers.status();
  geometry.layer = *std::move(layers);

  std::vector<int32_t> bf16_layers;
  if (!options.bf16_layers.empty()) {
    auto named = ParseLayerList(options.bf16_layers, options.layers);
    if (!named.ok()) return Invalid(options, "bf16_layers: ", named.status().message());
    bf16_layers = *std::move(named);
  }
  for (int32_t layer = 0; layer < options.layers; ++layer) {
    const bool stays = std::binary_search(bf16_layers.begin(), bf16_layers.end(), layer);
    PlaceLayer(layer, stays ? Precision::kBf16 : precision, &geometry);
  }
  return geometry;
}

int64_t PlainBlockBytes(Precision precision, int32_t head_dim) {
  return KvBytesPerToken(precision, head_dim) * kPageTokens;
}

absl::StatusOr<std::vector<ModelPools>> PlanPools(absl::Span<const ModelGeometry> geometries,
                                                  absl::Span<const ModelOptions> models,
                                                  const CacheOptions& cache, int64_t bytes_free,
                                                  const BlockBytesFn& block_bytes) {
  std::vector<ModelPools> pools(geometries.size());
  int64_t needed = 0;
  for (size_t m = 0; m < geometries.size(); ++m) {
    for (const LayerGroup& group : geometries[m].groups) {
      const auto pool = NeededPool(models[m], group, cache, block_bytes);
      if (!pool.ok()) return pool.status();
      const absl::uint128 sum = absl::uint128(pool->pages) * pool->page_bytes + needed;
      if (sum > kPoolBytesMax) {
        return Invalid(models[m],
                       "with it the models' expected_seqs x expected_tokens need more than ",
                       kPoolBytesMax, " bytes; lower expected_seqs or expected_tokens");
      }
      needed = static_cast<int64_t>(sum);
      pools[m].groups.push_back(*pool);
    }
  }
  int64_t bytes = cache.pool_bytes;
  if (cache.pool_fraction > 0) bytes = static_cast<int64_t>(cache.pool_fraction * bytes_free);
  if (bytes > 0 || cache.pool_fraction > 0) {
    if (const absl::Status status = ScalePools(models, bytes, needed, &pools); !status.ok()) {
      return status;
    }
  }
  return pools;
}

}  // namespace fp8kvd::config
