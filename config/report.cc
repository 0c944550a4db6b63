#include "config/report.h"

#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "config/device_list.h"
#include "config/keys.h"
#include "config/layer_list.h"

namespace fp8kvd::config {
namespace {

template <typename Owner>
void AppendKeys(absl::Span<const Key<Owner>> keys, const Owner& owner, const std::string& indent,
                std::string* text) {
  const Owner standard;
  for (const Key<Owner>& key : keys) {
    const std::string value = ValueText(key, owner);
    if (value == ValueText(key, standard)) continue;
    absl::StrAppend(text, indent, key.name, ": ", value, "\n");
  }
}

// A model as it was loaded: an imported shape is written out, so hf_config is not.
void AppendModel(const ModelOptions& model, std::string* text) {
  ModelOptions shown = model;
  shown.hf_config.clear();
  absl::StrAppend(text, "models {\n");
  if (!model.hf_config.empty()) {
    absl::StrAppend(text, "  # shape from ", absl::CEscape(model.hf_config), "\n");
  }
  AppendKeys(ModelKeys(), shown, "  ", text);
  for (const LayerRule& rule : model.layer_rules) {
    absl::StrAppend(text, "  layer_rules {\n");
    AppendKeys(LayerRuleKeys(), rule, "    ", text);
    absl::StrAppend(text, "  }\n");
  }
  absl::StrAppend(text, "}\n");
}

std::string Mebibytes(double bytes) { return absl::StrFormat("%.1f MiB", bytes / (1 << 20)); }

double PoolBytes(const ModelPools& pools) {
  double bytes = 0;
  for (const GroupPool& pool : pools.groups) {
    bytes += static_cast<double>(pool.pages) * static_cast<double>(pool.page_bytes);
  }
  return bytes;
}

std::string GroupLine(const LayerGroup& group, const GroupPool& pool, size_t index) {
  const std::string window =
      group.window > 0 ? absl::StrCat("window ", group.window) : std::string("all tokens");
  return absl::StrFormat(
      "group %d: layers %s, %s, %s: %d pages of %d bytes (%s), at most %d per sequence", index,
      FormatLayerList(group.layers), window, PrecisionName(group.precision), pool.pages,
      pool.page_bytes,
      Mebibytes(static_cast<double>(pool.pages) * static_cast<double>(pool.page_bytes)),
      pool.pages_per_seq);
}

}  // namespace

std::string EffectiveConfig(const Loaded& loaded) {
  std::string text;
  std::string section;
  for (const Key<Options>& key : Keys()) {
    if (section != key.section) {
      absl::StrAppend(&text, section.empty() ? "" : "}\n", key.section, " {\n");
      section = key.section;
    }
    const auto source = loaded.sources.find(PathOf(key));
    absl::StrAppend(&text, "  ", key.name, ": ", ValueText(key, loaded.options),
                    source == loaded.sources.end() ? "" : absl::StrCat("  # ", source->second),
                    "\n");
  }
  absl::StrAppend(&text, "}\n");
  for (const ModelOptions& model : loaded.options.models) AppendModel(model, &text);
  for (const TenantOptions& tenant : loaded.options.tenants) {
    if (loaded.options.security.tokens_file.empty()) break;  // nobody told them apart
    absl::StrAppend(&text, "tenants {\n");
    AppendKeys(TenantKeys(), tenant, "  ", &text);
    absl::StrAppend(&text, "}\n");
  }
  return text;
}

std::vector<std::string> ModelLines(const PlannedModel& model, const ModelPools& pools) {
  const ModelGeometry& geometry = model.geometry;
  std::vector<std::string> lines;
  lines.push_back(absl::StrFormat(
      "model \"%s\": %d layers, %d q_heads, %d kv_heads, head_dim %d, sm_scale %.9g",
      absl::CEscape(geometry.name), geometry.layers, geometry.q_heads, geometry.kv_heads,
      geometry.head_dim, geometry.sm_scale));
  lines.push_back(absl::StrCat("  precision ", model.decision.reason));
  for (size_t g = 0; g < geometry.groups.size(); ++g) {
    lines.push_back(absl::StrCat("  ", GroupLine(geometry.groups[g], pools.groups[g], g)));
  }
  return lines;
}

absl::StatusOr<std::string> CheckReport(const Loaded& loaded, int64_t bytes_free,
                                        const BlockBytesFn& block_bytes) {
  CacheOptions cache = loaded.options.cache;
  const bool unknown = cache.pool_fraction > 0 && bytes_free == 0;
  if (unknown) cache.pool_fraction = 0;
  std::vector<ModelGeometry> geometries;
  for (const PlannedModel& model : loaded.models) geometries.push_back(model.geometry);
  const int32_t devices = DevicesNamed(loaded.options.engine);
  std::vector<ModelOptions> models;
  for (const ModelOptions& model : loaded.options.models) models.push_back(OnOneOf(devices, model));
  const auto pools =
      PlanPools(geometries, models, OnOneOf(devices, cache), bytes_free, block_bytes);
  if (!pools.ok()) return pools.status();

  std::string text = EffectiveConfig(loaded);
  absl::StrAppend(&text, "\n");
  double bytes = 0;
  for (size_t m = 0; m < loaded.models.size(); ++m) {
    for (const std::string& line : ModelLines(loaded.models[m], (*pools)[m])) {
      absl::StrAppend(&text, "# ", line, "\n");
    }
    bytes += PoolBytes((*pools)[m]);
  }
  const std::string each = devices == 1 ? "" : absl::StrCat(" on each of ", devices, " devices");
  absl::StrAppendFormat(&text, "# pools: %.0f bytes (%s)%s%s\n", bytes, Mebibytes(bytes), each,
                        unknown ? ", before pool_fraction scales them to the device" : "");
  for (const std::string& warning : loaded.warnings) {
    absl::StrAppend(&text, "# warning: ", warning, "\n");
  }
  return text;
}

}  // namespace fp8kvd::config
