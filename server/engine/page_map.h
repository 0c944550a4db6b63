// server/engine/page_map.h: page ids to addresses. Holds the pools' and block tables' memory, taken
// once.
//
// The only place on the host that multiplies a page id by a stride (kernels/params.h has the
// formula). A block table of the device stands at a fixed place for each (sequence index, layer
// group of its model); it is seq_len_max / kPageTokens entries wide. Entries of page numbers that a
// sequence does not hold are stale: kernels read only those that a visible or appended token needs.
// Threads: the engine's.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "cache/ids.h"
#include "config/base/limits.h"
#include "kernels/backend.h"
#include "server/engine/model_setup.h"

namespace fp8kvd::engine {

class PageMap {
 public:
  // Errors: the backend's RESOURCE_EXHAUSTED.
  static absl::StatusOr<PageMap> Make(kernels::Backend* backend,
                                      const std::vector<ModelSetup>& models, int32_t seqs_max,
                                      int64_t seq_len_max);

  uint8_t* Page(int32_t model, int32_t group, cache::PageId page_id) const {
    const Pool& pool = pools_[model][group];
    return pool.bytes + static_cast<int64_t>(page_id) * pool.page_stride;
  }
  int64_t page_stride(int32_t model, int32_t group) const {
    return pools_[model][group].page_stride;
  }
  // AppendRow::base and DecodeRow::base.
  uint8_t* LayerBase(int32_t model, int32_t group, int32_t group_layer) const {
    const Pool& pool = pools_[model][group];
    return pool.bytes + group_layer * pool.layer_stride;
  }
  int32_t* BlockTable(cache::SeqIndex seq, int32_t group) const {
    return tables_ + (static_cast<int64_t>(seq) * groups_max_ + group) * table_entries_;
  }

 private:
  struct Pool {
    uint8_t* bytes = nullptr;
    int64_t page_stride = 0;
    int64_t layer_stride = 0;
  };

  PageMap() = default;

  std::vector<std::vector<Pool>> pools_;  // [models][groups]
  int32_t* tables_ = nullptr;             // [seqs_max, groups_max_, table_entries_]
  int64_t groups_max_ = 0;
  int64_t table_entries_ = 0;
};

}  // namespace fp8kvd::engine
