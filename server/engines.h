// server/engines.h: the devices, an engine on each, and the threads that run them.
//
// Promises: pools are planned for each device by its own free memory (devices on the CPU share the
//   host's). One incarnation is of all. Where a device fails its engine ends, and the process gets
//   SIGTERM: the others finish what they took, in the drain that follows.
// Threads: one; failed() from any.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "config/load.h"
#include "config/model.h"
#include "server/device.h"
#include "server/engine/clock.h"
#include "server/engine/fleet.h"

namespace fp8kvd {

class Engines {
 public:
  // loaded: a calibration of another device is taken out of it. Logs what there is. The clock
  // outlives the engines.
  static absl::StatusOr<std::unique_ptr<Engines>> Make(config::Loaded* loaded,
                                                       const engine::Clock* clock);
  ~Engines() { Join(); }
  Engines(const Engines&) = delete;
  Engines& operator=(const Engines&) = delete;

  engine::Fleet& fleet() { return *fleet_; }
  const std::vector<Device>& devices() const { return devices_.all; }
  const std::vector<config::ModelPools>& pools(size_t device) const { return pools_[device]; }

  // Starts a thread for each.
  void Run();
  bool is_running() const { return !threads_.empty(); }
  // Until all have ended: after Drain, or a device's failure and Drain.
  void Join();
  bool failed() const { return failed_; }
  std::string Fault() const;  // after Join: what failed, and how; empty: nothing

 private:
  Engines() = default;
  absl::Status PlanPools(const config::Loaded& loaded);
  absl::Status Start(const config::Loaded& loaded, const engine::Clock* clock);
  void RunOne(size_t device);

  Devices devices_;
  std::vector<std::vector<config::ModelPools>> pools_;  // [devices]
  std::vector<std::unique_ptr<engine::Engine>> engines_;
  std::unique_ptr<engine::Fleet> fleet_;
  std::vector<absl::Status> ends_;  // what each Run said
  std::atomic<bool> failed_{false};
  std::vector<std::thread> threads_;
};

}  // namespace fp8kvd
