// tests/translate/catalog.h: a small daemon's catalog for tests: one plain model, and one whose
// layers have windows and sinks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "server/translate/catalog.h"

namespace fp8kvd::translate {

// Elements of a token's q, and of its k and v, in every SmallModel.
constexpr int64_t kQRow = 4 * 64;
constexpr int64_t kKvRow = 2 * 64;

inline CatalogModel SmallModel(const std::string& name, int32_t window, bool has_sinks) {
  CatalogModel model;
  ModelGeometry& geometry = model.geometry;
  geometry.name = name;
  geometry.layers = 3;
  geometry.q_heads = 4;
  geometry.kv_heads = 2;
  geometry.head_dim = 64;
  geometry.sm_scale = 0.125F;
  for (int32_t i = 0; i < 3; ++i) {
    geometry.layer.push_back(
        {.window = window, .softcap = 0, .has_sinks = has_sinks, .group = 0, .group_layer = i});
  }
  geometry.groups.push_back({.kv_heads = 2,
                             .head_dim = 64,
                             .window = window,
                             .precision = Precision::kFp8Kv,
                             .layers = {0, 1, 2}});
  model.slice_tokens = {50, 9, 8};
  model.group_page_bytes = {12345};
  return model;
}

inline Catalog SmallCatalog() {
  Catalog catalog;
  catalog.models.push_back(SmallModel("plain", 0, false));
  catalog.models.push_back(SmallModel("windowed", 100, true));
  catalog.slot_bytes_max = 32 << 20;
  catalog.seq_len_max = 4096;
  catalog.seqs_max = 100;
  catalog.lease_ttl_ms = 60000;
  catalog.lease_ttl_ms_max = 3600000;
  return catalog;
}

}  // namespace fp8kvd::translate
