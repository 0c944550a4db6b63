#include "server/make_catalog.h"

#include <fstream>
#include <utility>

#include "server/engine/append_step.h"
#include "server/version.h"

namespace fp8kvd {

translate::Catalog MakeCatalog(const config::Loaded& loaded, Engines& engines) {
  engine::Engine& first = engines.fleet().Of(0);
  translate::Catalog catalog;
  // Empty where the system does not say: then no client asks for it.
  std::ifstream("/proc/sys/kernel/random/boot_id") >> catalog.host_id;
  catalog.version = kVersion;
  catalog.incarnation = first.incarnation();
  catalog.device_kind = engines.devices().front().backend->Device().kind;
  for (const Device& device : engines.devices()) {
    catalog.devices.push_back({.name = device.name, .model = device.backend->Device().name});
  }
  catalog.message_bytes_max = loaded.options.server.message_bytes_max;
  catalog.slot_bytes_max = first.staging().slot_bytes_max();
  catalog.streams_rows = engines.devices().front().backend->Device().returns_at_once;
  catalog.seqs_max = loaded.options.cache.seqs_max;
  catalog.seq_len_max = loaded.options.cache.seq_len_max;
  catalog.lease_ttl_ms = loaded.options.cache.lease_ttl_ms;
  catalog.lease_ttl_ms_max = loaded.options.cache.lease_ttl_ms_max;
  for (size_t i = 0; i < loaded.models.size(); ++i) {
    const config::PlannedModel& from = loaded.models[i];
    translate::CatalogModel model;
    model.geometry = from.geometry;
    model.precision_reason = from.decision.reason;
    for (int32_t layer = 0; layer < from.geometry.layers; ++layer) {
      model.slice_tokens.push_back(engine::AppendSliceTokens(
          loaded.options.engine, loaded.options.cache, from.geometry, layer, /*layers_count=*/1));
    }
    for (const config::GroupPool& pool : engines.pools(0)[i].groups) {
      model.group_page_bytes.push_back(pool.page_bytes);
    }
    catalog.models.push_back(std::move(model));
  }
  return catalog;
}

}  // namespace fp8kvd
