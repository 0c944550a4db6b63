// server/engine/model_setup.h: a model and the pages that each of its layer groups gets.
#pragma once

#include <cstdint>
#include <vector>

#include "config/base/geometry.h"

namespace fp8kvd::engine {

struct ModelSetup {
  ModelGeometry geometry;
  std::vector<int64_t> group_pages;  // [groups]

  const LayerGroup& GroupOf(int32_t layer) const {
    return geometry.groups[geometry.layer[layer].group];
  }
};

}  // namespace fp8kvd::engine
