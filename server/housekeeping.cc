#include "server/housekeeping.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"

#include "config/cache_share.h"
#include "config/layer_list.h"
#include "server/unix_ms.h"

namespace fp8kvd {
namespace {

ops::StatusFacts FactsOf(const translate::Catalog& catalog, std::vector<std::string> tenants) {
  ops::StatusFacts facts{.version = catalog.version,
                         .incarnation = absl::StrCat(absl::Hex(catalog.incarnation)),
                         .device_kind = catalog.device_kind,
                         .device_name = catalog.devices.front().model,
                         .devices = {},
                         .start_ms = UnixMs(),
                         .models = {},
                         .tenants = std::move(tenants)};
  for (const translate::CatalogDevice& device : catalog.devices) {
    facts.devices.push_back(device.name);
  }
  for (const translate::CatalogModel& from : catalog.models) {
    ops::StatusFacts::Model model{.name = from.geometry.name,
                                  .layers = from.geometry.layers,
                                  .q_heads = from.geometry.q_heads,
                                  .kv_heads = from.geometry.kv_heads,
                                  .head_dim = from.geometry.head_dim,
                                  .precision_reason = from.precision_reason,
                                  .groups = {}};
    for (size_t i = 0; i < from.geometry.groups.size(); ++i) {
      const LayerGroup& group = from.geometry.groups[i];
      model.groups.push_back({.layers = config::FormatLayerList(group.layers),
                              .window = group.window,
                              .precision = config::PrecisionName(group.precision),
                              .page_bytes = from.group_page_bytes[i]});
    }
    facts.models.push_back(std::move(model));
  }
  return facts;
}

}  // namespace

Housekeeping::Housekeeping(const translate::Catalog& catalog, std::vector<std::string> tenants,
                           const ops::Readiness* readiness, const ops::Metrics* metrics,
                           const engine::Clock* clock,
                           std::function<std::vector<engine::EngineStats>()> stats)
    : facts_(FactsOf(catalog, std::move(tenants))),
      readiness_(readiness),
      metrics_(metrics),
      clock_(clock),
      stats_(std::move(stats)),
      progress_(catalog.devices.size()) {}

ops::Totals Housekeeping::TotalsNow() const {
  ops::Totals totals{
      .time_ms = UnixMs(), .engine = {}, .calls = metrics_->Calls(), .devices = stats_()};
  totals.engine = engine::SumOf(totals.devices);
  return totals;
}

void Housekeeping::Look() {
  ops::Totals totals = TotalsNow();
  for (size_t i = 0; i < progress_.size(); ++i) {
    progress_[i].Look(clock_->NowUs() / 1000, totals.devices[i]);
  }
  history_.Add(std::move(totals));
}

bool Housekeeping::is_stalled() const {
  return std::any_of(progress_.begin(), progress_.end(),
                     [](const ops::Progress& progress) { return progress.is_stalled(); });
}

std::string Housekeeping::StatusJson() const {
  return ops::StatusJson(facts_, *readiness_, TotalsNow(), history_);
}

}  // namespace fp8kvd
