// server/ops/statusz.h: the status page. /statusz is one file without outside assets; it asks for
// /statusz.json every two seconds and draws it, as `fp8kvctl top` does in a terminal.
//
// The JSON: version, incarnation, state, why, device {kind, name}, time_ms, uptime_s, interval_ms;
//   now {...} of the counters; models [{name, layers, q_heads, kv_heads, head_dim, reason, groups
//   [{layers, window, precision, pages_total, pages_used, pages_free, pages_reserved,
//   page_bytes}]}]; tenants [{name, seqs, queue_items, pages_used, pages_total}], empty where none
//   are configured; history {time_ms [], and one array for each of History::kSeries}, null where
//   nothing was observed. No secrets, no clients' words, no handles.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "server/ops/history.h"
#include "server/ops/readiness.h"

namespace fp8kvd::ops {

// What does not change while the daemon runs.
struct StatusFacts {
  struct Group {
    std::string layers;  // "0-4,6"
    int32_t window = 0;
    std::string precision;
    int64_t page_bytes = 0;
  };
  struct Model {
    std::string name;
    int32_t layers = 0;
    int32_t q_heads = 0;
    int32_t kv_heads = 0;
    int32_t head_dim = 0;
    std::string precision_reason;
    std::vector<Group> groups;
  };
  std::string version;
  std::string incarnation;
  std::string device_kind;
  std::string device_name;                // of the first
  std::vector<std::string> devices = {};  // "cuda:0"
  int64_t start_ms = 0;                   // since 1970
  std::vector<Model> models;
  std::vector<std::string> tenants = {};  // by TenantId
};

// The page.
extern const char kStatusPage[];

std::string StatusJson(const StatusFacts& facts, const Readiness& readiness, const Totals& now,
                       const History& history);

}  // namespace fp8kvd::ops
