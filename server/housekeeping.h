// server/housekeeping.h: what the main thread does while others serve: it looks at the counters
// every two seconds, keeps the last minutes for the status page, and judges whether the engine
// gets on.
//
// Threads: Look on one; the rest on any.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "server/engine/clock.h"
#include "server/ops/history.h"
#include "server/ops/metrics.h"
#include "server/ops/progress.h"
#include "server/ops/readiness.h"
#include "server/ops/statusz.h"
#include "server/translate/catalog.h"

namespace fp8kvd {

class Housekeeping {
 public:
  // All outlive it. stats, of each device, may be called on any thread.
  Housekeeping(const translate::Catalog& catalog, std::vector<std::string> tenants,
               const ops::Readiness* readiness, const ops::Metrics* metrics,
               const engine::Clock* clock, std::function<std::vector<engine::EngineStats>()> stats);

  // Every History::kIntervalMs.
  void Look();

  // Any of the engines is.
  bool is_stalled() const;
  std::string StatusJson() const;

 private:
  ops::Totals TotalsNow() const;

  const ops::StatusFacts facts_;
  const ops::Readiness* const readiness_;
  const ops::Metrics* const metrics_;
  const engine::Clock* const clock_;
  const std::function<std::vector<engine::EngineStats>()> stats_;
  std::deque<ops::Progress> progress_;  // of each device
  ops::History history_;
};

}  // namespace fp8kvd
