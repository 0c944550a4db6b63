// server/ops/nvml.h: memory and load of the GPU as its driver's management library tells them. The
// library belongs to the driver, so it is opened while the daemon runs; where it is missing, too
// old or refuses, the metrics of it are missing and nothing else changes.
//
// Does not manage: what our pools hold (engine/stats.h): another process's memory counts here too.
// Threads: any, one at a time. Cost: two calls into the driver for each Read, some 100 us.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace fp8kvd::ops {

struct GpuReading {
  uint64_t memory_bytes_used = 0;
  uint64_t memory_bytes_free = 0;
  double busy_ratio = 0;  // of the driver's last sample period: time with a kernel running
};

class Nvml {
 public:
  static constexpr char kLibrary[] = "libnvidia-ml.so.1";

  // pci_bus_id: of the device that serves, as CUDA names it ("0000:3b:00.0"). UNAVAILABLE with the
  // reason: no library, not what it must have, or it does not know the device.
  static absl::StatusOr<std::unique_ptr<Nvml>> Open(const std::string& library,
                                                    const std::string& pci_bus_id);
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  // UNAVAILABLE with what the driver says.
  absl::StatusOr<GpuReading> Read() const;

 private:
  struct Library;
  explicit Nvml(std::unique_ptr<Library> library);

  const std::unique_ptr<Library> library_;
};

}  // namespace fp8kvd::ops
