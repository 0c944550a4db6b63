#include "server/engine/snapshot_facts.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include <xxhash.h>

#include "config/cache_share.h"
#include "config/layer_list.h"

namespace fp8kvd::engine {
namespace {

using Shape = std::pair<Precision, int32_t>;  // and head_dim

// The i-th value of a row of tests: finite, of either sign, of some forty binades.
uint16_t ProbeValue(uint32_t i) {
  const uint32_t mixed = (i * 2654435761U) ^ (i >> 3);
  const uint32_t exponent = 107 + (mixed >> 8) % 40;
  return static_cast<uint16_t>((mixed & 0x8000U) | exponent << 7 | (mixed & 0x7FU));
}

// The hash of a block that an append has filled, in a page of one block.
absl::StatusOr<uint64_t> LayoutOf(const Shape& shape, kernels::Backend* backend) {
  const auto [precision, head_dim] = shape;
  const int64_t block_bytes = backend->BlockBytes(precision, head_dim);
  const absl::StatusOr<uint8_t*> page = backend->AllocPool(block_bytes);
  if (!page.ok()) return page.status();
  const absl::StatusOr<int32_t*> table = backend->AllocTable(1);
  if (!table.ok()) return table.status();
  const size_t values = size_t{kPageTokens} * static_cast<size_t>(head_dim);
  const absl::StatusOr<uint8_t*> rows =
      backend->AllocStaging(static_cast<int64_t>(2 * values * sizeof(uint16_t)));
  if (!rows.ok()) return rows.status();
  auto* const k = reinterpret_cast<uint16_t*>(*rows);
  for (size_t i = 0; i < 2 * values; ++i) k[i] = ProbeValue(static_cast<uint32_t>(i));

  const kernels::TableEdit edit{.at = *table, .page = 0};
  absl::Status status = backend->UpdateTables(absl::MakeConstSpan(&edit, 1));
  if (!status.ok()) return status;
  const kernels::AppendRow row{.k = k,
                               .v = k + values,
                               .block_table = *table,
                               .base = *page,
                               .page_stride = block_bytes,
                               .pos = 0,
                               .n = kPageTokens,
                               .kv_heads = 1};
  status = backend->Append(
      {.rows = &row, .rows_count = 1, .head_dim = head_dim, .precision = precision});
  if (!status.ok()) return status;
  std::vector<uint8_t> bytes(static_cast<size_t>(block_bytes));
  status = backend->Read(*page, absl::MakeSpan(bytes));
  if (!status.ok()) return status;
  return XXH3_64bits(bytes.data(), bytes.size());
}

// "0-4: softcap 50; 5: softcap 50, sinks".
std::string Attention(const ModelGeometry& geometry) {
  std::map<std::pair<float, bool>, std::vector<int32_t>> kinds;
  for (int32_t i = 0; i < geometry.layers; ++i) {
    const LayerGeometry& layer = geometry.layer[static_cast<size_t>(i)];
    kinds[{layer.softcap, layer.has_sinks}].push_back(i);
  }
  std::string text = absl::StrCat("sm_scale ", geometry.sm_scale);
  for (const auto& [kind, layers] : kinds) {
    absl::StrAppend(&text, "; layers ", config::FormatLayerList(layers), ": softcap ", kind.first,
                    kind.second ? ", sinks" : "");
  }
  return text;
}

}  // namespace

absl::StatusOr<std::vector<SnapshotFact>> MakeFacts(const std::vector<ModelSetup>& models,
                                                    const config::CacheOptions& options,
                                                    kernels::Backend* backend) {
  std::map<Shape, uint64_t> layouts;
  std::vector<SnapshotFact> facts;
  const auto add = [&facts](const std::string& name, const auto& value) {
    facts.push_back({.name = name, .value = absl::StrCat(value)});
  };
  add("device", backend->Device().kind);
  add("tokens of a page", kPageTokens);
  add("reclaim_slack_tokens", options.reclaim_slack_tokens);
  for (const ModelSetup& model : models) {
    const ModelGeometry& geometry = model.geometry;
    const std::string name = absl::StrCat("model ", geometry.name);
    add(absl::StrCat(name, ", layers"), geometry.layers);
    add(absl::StrCat(name, ", q_heads"), geometry.q_heads);
    add(absl::StrCat(name, ", attention"), Attention(geometry));
    add(absl::StrCat(name, ", layer groups"), geometry.groups.size());
    for (size_t g = 0; g < geometry.groups.size(); ++g) {
      const LayerGroup& group = geometry.groups[g];
      const std::string of = absl::StrCat(name, ", layer group ", g, ", ");
      const Shape shape(group.precision, group.head_dim);
      if (layouts.find(shape) == layouts.end()) {
        const absl::StatusOr<uint64_t> layout = LayoutOf(shape, backend);
        if (!layout.ok()) return layout.status();
        layouts[shape] = *layout;
      }
      add(absl::StrCat(of, "layers"), config::FormatLayerList(group.layers));
      add(absl::StrCat(of, "kv_heads"), group.kv_heads);
      add(absl::StrCat(of, "head_dim"), group.head_dim);
      add(absl::StrCat(of, "window"), group.window);
      add(absl::StrCat(of, "precision"), config::PrecisionName(group.precision));
      add(absl::StrCat(of, "bytes of a block"), backend->BlockBytes(shape.first, shape.second));
      add(absl::StrCat(of, "layout of a block"), absl::Hex(layouts[shape], absl::kZeroPad16));
    }
  }
  return facts;
}

absl::Status CompareFacts(const std::vector<SnapshotFact>& saved,
                          const std::vector<SnapshotFact>& here) {
  for (const SnapshotFact& fact : saved) {
    const auto same = std::find_if(here.begin(), here.end(), [&](const SnapshotFact& other) {
      return other.name == fact.name;
    });
    if (same != here.end() && same->value == fact.value) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("it is of another daemon: ", fact.name, " is ", fact.value, " in it, and ",
                     same == here.end() ? "unknown" : same->value,
                     " here; start with the models, device and precisions that wrote it"));
  }
  return absl::OkStatus();
}

}  // namespace fp8kvd::engine
