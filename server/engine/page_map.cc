#include "server/engine/page_map.h"

#include <algorithm>

namespace fp8kvd::engine {

absl::StatusOr<PageMap> PageMap::Make(kernels::Backend* backend,
                                      const std::vector<ModelSetup>& models, int32_t seqs_max,
                                      int64_t seq_len_max) {
  PageMap map;
  map.table_entries_ = (seq_len_max + kPageTokens - 1) / kPageTokens;
  for (const ModelSetup& model : models) {
    std::vector<Pool>& pools = map.pools_.emplace_back();
    const std::vector<LayerGroup>& groups = model.geometry.groups;
    map.groups_max_ = std::max(map.groups_max_, static_cast<int64_t>(groups.size()));
    for (size_t g = 0; g < groups.size(); ++g) {
      Pool& pool = pools.emplace_back();
      pool.layer_stride =
          backend->BlockBytes(groups[g].precision, groups[g].head_dim) * groups[g].kv_heads;
      pool.page_stride = pool.layer_stride * static_cast<int64_t>(groups[g].layers.size());
      absl::StatusOr<uint8_t*> bytes = backend->AllocPool(pool.page_stride * model.group_pages[g]);
      if (!bytes.ok()) return bytes.status();
      pool.bytes = *bytes;
    }
  }
  absl::StatusOr<int32_t*> tables =
      backend->AllocTable(int64_t{seqs_max} * map.groups_max_ * map.table_entries_);
  if (!tables.ok()) return tables.status();
  map.tables_ = *tables;
  return map;
}

}  // namespace fp8kvd::engine
