// client/cc/ctl/gpus.h: memory and read bandwidth of GPUs that an engine may run on, by their
// vendor: what fp8kvctl plan takes for its engine's device where nothing was measured.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace fp8kvd::ctl {

struct Gpu {
  const char* name;         // of --gpu
  const char* device_name;  // begins what the driver calls it
  double memory_gb;
  double read_gb_s;
};

// Null: not in the table.
const Gpu* FindGpu(absl::string_view name);
// The GPU of a calibration's device_name.
const Gpu* FindGpuOfDevice(absl::string_view device_name);
// "a10, a100_40, …"
std::string GpuNames();

}  // namespace fp8kvd::ctl
