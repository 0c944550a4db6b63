// server/live_load.h: the load that the daemon really serves, in windows of policy.live_window_ms:
// what metrics, PlanPrecision and the log say of it.
//
// A model's window is closed by Tick once it is old enough and saw a whole step. What is told of a
// model is its latest closed window, or else what the first one has seen so far.
// Threads: any; Tick on one.
#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "config/live_load.h"
#include "config/load.h"
#include "server/engine/clock.h"
#include "server/engine/stats.h"

namespace fp8kvd {

class LiveLoad {
 public:
  // loaded and clock outlive this. stats: of the engine, whenever asked.
  LiveLoad(const config::Loaded* loaded, const engine::Clock* clock,
           std::function<engine::EngineStats()> stats);

  // Closes the window if it is due, or at once when `last`. Gives the hints that were not given
  // before: a model's comes again only after a window that agreed with the configuration.
  std::vector<std::string> Tick(bool last = false);

  // Nothing before the model's first whole step.
  std::optional<config::LiveVerdict> Of(int32_t model) const;

 private:
  struct Model {
    int64_t start_us = 0;         // of its open window
    engine::ModelStats at_start;  // what it had decoded by then
    std::optional<config::LiveVerdict> closed;
    bool told = false;  // the hint
  };
  std::optional<config::LiveVerdict> Judge(int32_t model, const engine::ModelStats& now,
                                           int64_t now_us) const;

  const config::Loaded* const loaded_;
  const engine::Clock* const clock_;
  const std::function<engine::EngineStats()> stats_;
  mutable std::mutex mutex_;  // all below
  std::vector<Model> models_;
};

}  // namespace fp8kvd
