// server/engine/model_setup.h: a model and the pages that each of its layer groups gets.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "config/base/geometry.h"

namespace fp8kvd::engine {

struct ModelSetup {
  ModelGeometry geometry;
  std::vector<int64_t> group_pages;  // [groups]
  // Those of them that a sequence of the configured length takes [groups]; empty: not known.
  std::vector<int64_t> group_pages_per_seq = {};

  const LayerGroup& GroupOf(int32_t layer) const {
    return geometry.groups[geometry.layer[layer].group];
  }
};

// Keys that an item of q_len queries from pos on sees, those of its queries taken together.
inline int64_t KeysSeen(const LayerGroup& group, int64_t pos, int32_t q_len) {
  const int64_t all = pos + q_len;
  return group.window == 0 ? all : std::min<int64_t>(all, int64_t{group.window} + q_len - 1);
}

}  // namespace fp8kvd::engine
