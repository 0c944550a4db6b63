#include "server/engines.h"

#include <unistd.h>

#include <csignal>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

#include "config/device_list.h"
#include "config/report.h"
#include "server/engine/admission.h"
#include "server/version.h"

namespace fp8kvd {
namespace {

uint64_t RandomIncarnation() {
  std::random_device device;
  const uint64_t high = device();
  return high << 32 | device();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engines>> Engines::Make(config::Loaded* loaded,
                                                       const engine::Clock* clock) {
  std::unique_ptr<Engines> self(new Engines);
  absl::StatusOr<Devices> devices = MakeDevices(loaded->options.engine);
  if (!devices.ok()) return devices.status();
  self->devices_ = *std::move(devices);
  if (!self->devices_.why_no_gpu.empty()) spdlog::info("{}", self->devices_.why_no_gpu);
  const std::string first = self->devices_.all.front().backend->Device().name;
  for (const Device& device : self->devices_.all) {
    const kernels::DeviceInfo info = device.backend->Device();
    spdlog::info("device {} ({}), {} MiB free", device.name, info.name, info.bytes_free >> 20);
    if (info.name != first) {
      spdlog::warn("device {} is another than {}: precisions are decided for the first",
                   device.name, first);
    }
  }
  absl::Status status = config::DropForeignCalibration(kVersion, first, loaded);
  if (!status.ok()) return status;
  for (const std::string& warning : loaded->warnings) spdlog::warn("{}", warning);
  status = self->PlanPools(*loaded);
  if (status.ok()) status = self->Start(*loaded, clock);
  if (!status.ok()) return status;
  return self;
}

absl::Status Engines::PlanPools(const config::Loaded& loaded) {
  const auto count = static_cast<int32_t>(devices_.all.size());
  std::vector<ModelGeometry> geometries;
  std::vector<config::ModelOptions> models;
  for (const config::PlannedModel& model : loaded.models) geometries.push_back(model.geometry);
  for (const config::ModelOptions& model : loaded.options.models) {
    models.push_back(config::OnOneOf(count, model));
  }
  for (const Device& device : devices_.all) {
    kernels::Backend* const backend = device.backend.get();
    // CPU devices are in the same memory.
    const int64_t sharers = device.workers == nullptr ? 1 : count;
    absl::StatusOr<std::vector<config::ModelPools>> pools = config::PlanPools(
        geometries, models, config::OnOneOf(count, loaded.options.cache),
        backend->Device().bytes_free / sharers, [backend](Precision precision, int32_t head_dim) {
          return backend->BlockBytes(precision, head_dim);
        });
    if (!pools.ok()) {
      if (count == 1) return pools.status();
      return absl::Status(pools.status().code(),
                          absl::StrCat(device.name, ": ", pools.status().message()));
    }
    for (size_t i = 0; i < geometries.size(); ++i) {
      for (const std::string& line : config::ModelLines(loaded.models[i], (*pools)[i])) {
        spdlog::info("{}{}", count == 1 ? "" : device.name + " ", line);
      }
    }
    pools_.push_back(*std::move(pools));
  }
  return absl::OkStatus();
}

absl::Status Engines::Start(const config::Loaded& loaded, const engine::Clock* clock) {
  const config::Options& options = loaded.options;
  const uint64_t incarnation = RandomIncarnation();
  const auto queues = std::make_shared<engine::TenantQueues>(options.tenants);
  std::vector<engine::Engine*> raw;
  for (size_t device = 0; device < devices_.all.size(); ++device) {
    std::vector<engine::ModelSetup> setups;
    for (size_t i = 0; i < loaded.models.size(); ++i) {
      engine::ModelSetup& setup = setups.emplace_back();
      setup.geometry = loaded.models[i].geometry;
      for (const config::GroupPool& pool : pools_[device][i].groups) {
        setup.group_pages.push_back(pool.pages);
        setup.group_pages_per_seq.push_back(pool.pages_per_seq);
      }
    }
    absl::StatusOr<std::unique_ptr<engine::Engine>> engine =
        engine::Engine::Start(options.engine, options.cache, std::move(setups), incarnation,
                              devices_.all[device].backend.get(), clock, options.tenants,
                              {.home = static_cast<uint32_t>(device), .queues = queues});
    if (!engine.ok()) return engine.status();
    raw.push_back(engine->get());
    engines_.push_back(*std::move(engine));
  }
  fleet_ = std::make_unique<engine::Fleet>(std::move(raw), options.tenants);
  ends_.resize(engines_.size());
  return absl::OkStatus();
}

void Engines::Run() {
  for (size_t device = 0; device < engines_.size(); ++device) {
    threads_.emplace_back([this, device] { RunOne(device); });
  }
}

void Engines::RunOne(size_t device) {
  ends_[device] = engines_[device]->Run();
  if (ends_[device].ok()) return;
  failed_ = true;
  kill(getpid(), SIGTERM);  // ends the wait of the main thread
}

void Engines::Join() {
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

std::string Engines::Fault() const {
  std::string fault;
  for (size_t device = 0; device < ends_.size(); ++device) {
    if (ends_[device].ok()) continue;
    absl::StrAppend(&fault, fault.empty() ? "" : "; ",
                    ends_.size() == 1 ? "" : devices_.all[device].name + ": ",
                    ends_[device].message());
  }
  return fault;
}

}  // namespace fp8kvd
