#include "client/cc/ctl/gpus.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace fp8kvd::ctl {
namespace {

// A launch of ours reads some 95 % of this: 4,590 GB/s of the H200's (docs/performance.md).
constexpr Gpu kGpus[] = {{"a10", "NVIDIA A10", 24, 600},
                         {"a100_40", "NVIDIA A100-SXM4-40GB", 40, 1555},
                         {"a100_80", "NVIDIA A100-SXM4-80GB", 80, 2039},
                         {"b200", "NVIDIA B200", 180, 8000},
                         {"h100", "NVIDIA H100 80GB HBM3", 80, 3350},
                         {"h200", "NVIDIA H200", 141, 4800},
                         {"l4", "NVIDIA L4", 24, 300},
                         {"l40s", "NVIDIA L40S", 48, 864},
                         {"rtx_4090", "NVIDIA GeForce RTX 4090", 24, 1008}};

}  // namespace

const Gpu* FindGpu(absl::string_view name) {
  for (const Gpu& gpu : kGpus) {
    if (name == gpu.name) return &gpu;
  }
  return nullptr;
}

const Gpu* FindGpuOfDevice(absl::string_view device_name) {
  for (const Gpu& gpu : kGpus) {
    if (absl::StartsWith(device_name, absl::StrCat(gpu.device_name, " (")) ||
        device_name == gpu.device_name) {
      return &gpu;
    }
  }
  return nullptr;
}

std::string GpuNames() {
  std::string names;
  for (const Gpu& gpu : kGpus) absl::StrAppend(&names, names.empty() ? "" : ", ", gpu.name);
  return names;
}

}  // namespace fp8kvd::ctl
