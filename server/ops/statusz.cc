#include "server/ops/statusz.h"

#include <cmath>
#include <deque>

#include "absl/strings/str_cat.h"

#include "server/ops/log.h"

namespace fp8kvd::ops {
namespace {

std::string Quoted(const std::string& text) { return absl::StrCat("\"", JsonEscaped(text), "\""); }

const char* StateName(State state) {
  constexpr const char* kNames[] = {"starting", "ready", "draining", "failed"};
  return kNames[static_cast<size_t>(state)];
}

void AppendGroup(const StatusFacts::Group& group, const engine::PoolStats& pool,
                 std::string* json) {
  absl::StrAppend(json, "{\"layers\":", Quoted(group.layers), ",\"window\":", group.window,
                  ",\"precision\":", Quoted(group.precision), ",\"pages_total\":", pool.pages_total,
                  ",\"pages_used\":", pool.pages_used, ",\"pages_free\":", pool.pages_free,
                  ",\"pages_reserved\":", pool.pages_reserved, ",\"page_bytes\":", group.page_bytes,
                  "}");
}

// stats.pools are in the order of models and their groups.
void AppendModels(const StatusFacts& facts, const engine::EngineStats& stats, std::string* json) {
  size_t pool = 0;
  absl::StrAppend(json, "\"models\":[");
  for (const StatusFacts::Model& model : facts.models) {
    absl::StrAppend(json, json->back() == '[' ? "" : ",", "{\"name\":", Quoted(model.name),
                    ",\"layers\":", model.layers, ",\"q_heads\":", model.q_heads,
                    ",\"kv_heads\":", model.kv_heads, ",\"head_dim\":", model.head_dim,
                    ",\"reason\":", Quoted(model.precision_reason), ",\"groups\":[");
    for (const StatusFacts::Group& group : model.groups) {
      if (json->back() != '[') json->push_back(',');
      AppendGroup(group, pool < stats.pools.size() ? stats.pools[pool] : engine::PoolStats{}, json);
      ++pool;
    }
    absl::StrAppend(json, "]}");
  }
  absl::StrAppend(json, "]");
}

// Those of all pools together.
void AppendPages(const std::vector<engine::PoolStats>& pools, std::string* json) {
  int64_t used = 0;
  int64_t total = 0;
  for (const engine::PoolStats& pool : pools) {
    used += pool.pages_used;
    total += pool.pages_total;
  }
  absl::StrAppend(json, "\"pages_used\":", used, ",\"pages_total\":", total);
}

void AppendTenants(const StatusFacts& facts, const engine::EngineStats& stats, std::string* json) {
  absl::StrAppend(json, "\"tenants\":[");
  for (size_t i = 0; i < facts.tenants.size() && i < stats.tenants.size(); ++i) {
    const engine::TenantStats& tenant = stats.tenants[i];
    absl::StrAppend(json, i == 0 ? "" : ",", "{\"name\":", Quoted(facts.tenants[i]),
                    ",\"seqs\":", tenant.seqs, ",\"queue_items\":", tenant.queue_items, ",");
    AppendPages(tenant.pools, json);
    absl::StrAppend(json, "}");
  }
  absl::StrAppend(json, "]");
}

void AppendDevices(const StatusFacts& facts, const std::vector<engine::EngineStats>& devices,
                   std::string* json) {
  absl::StrAppend(json, "\"devices\":[");
  for (size_t i = 0; i < facts.devices.size() && i < devices.size(); ++i) {
    const engine::EngineStats& device = devices[i];
    absl::StrAppend(json, i == 0 ? "" : ",", "{\"name\":", Quoted(facts.devices[i]),
                    ",\"seqs\":", device.seqs, ",\"queue_items\":", device.queue_items,
                    ",\"launches_inflight\":", device.launches_inflight,
                    ",\"rows_total\":", device.rows_total, ",");
    AppendPages(device.pools, json);
    absl::StrAppend(json, "}");
  }
  absl::StrAppend(json, "]");
}

void AppendNow(const engine::EngineStats& stats, std::string* json) {
  absl::StrAppend(json, "\"now\":{\"seqs\":", stats.seqs, ",\"queue_items\":", stats.queue_items,
                  ",\"launches_inflight\":", stats.launches_inflight,
                  ",\"staging_slots_used\":", stats.staging_slots_used,
                  ",\"staging_slots_total\":", stats.staging_slots_total,
                  ",\"lease_expiries_total\":", stats.lease_expiries_total,
                  ",\"requests_refused_total\":", stats.requests_refused_total, "}");
}

void AppendHistory(const std::deque<History::Sample>& samples, std::string* json) {
  absl::StrAppend(json, "\"history\":{\"time_ms\":[");
  for (const History::Sample& sample : samples) {
    absl::StrAppend(json, json->back() == '[' ? "" : ",", sample.time_ms);
  }
  for (size_t i = 0; i < History::kSeries.size(); ++i) {
    absl::StrAppend(json, "],\"", History::kSeries[i], "\":[");
    for (const History::Sample& sample : samples) {
      if (json->back() != '[') json->push_back(',');
      const double value = sample.values[i];
      if (std::isfinite(value)) {
        absl::StrAppend(json, value);
      } else {
        absl::StrAppend(json, "null");
      }
    }
  }
  absl::StrAppend(json, "]}");
}

}  // namespace

std::string StatusJson(const StatusFacts& facts, const Readiness& readiness, const Totals& now,
                       const History& history) {
  std::string json = absl::StrCat(
      "{\"version\":", Quoted(facts.version), ",\"incarnation\":", Quoted(facts.incarnation),
      ",\"state\":\"", StateName(readiness.state()), "\",\"why\":", Quoted(readiness.Why()),
      ",\"device\":{\"kind\":", Quoted(facts.device_kind), ",\"name\":", Quoted(facts.device_name),
      "},\"time_ms\":", now.time_ms, ",\"uptime_s\":", (now.time_ms - facts.start_ms) / 1000,
      ",\"interval_ms\":", History::kIntervalMs, ",");
  AppendNow(now.engine, &json);
  json.push_back(',');
  AppendModels(facts, now.engine, &json);
  json.push_back(',');
  AppendTenants(facts, now.engine, &json);
  json.push_back(',');
  AppendDevices(facts, now.devices, &json);
  json.push_back(',');
  AppendHistory(history.Copy(), &json);
  json.push_back('}');
  return json;
}

}  // namespace fp8kvd::ops
