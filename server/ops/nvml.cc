#include "server/ops/nvml.h"

#include <dlfcn.h>

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace fp8kvd::ops {
namespace {

// The few declarations that we need, as the library's own binary interface has them.
using Device = void*;
struct Memory {
  unsigned long long total;  // NOLINT(google-runtime-int): the library's own types
  unsigned long long free;   // NOLINT(google-runtime-int)
  unsigned long long used;   // NOLINT(google-runtime-int)
};
struct Utilization {
  unsigned int gpu;     // percent of the time
  unsigned int memory;  // likewise, of its memory controller
};
constexpr int kSuccess = 0;

}  // namespace

struct Nvml::Library {
  void* handle = nullptr;
  Device device = nullptr;
  bool is_initialized = false;
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  const char* (*error_string)(int) = nullptr;
  int (*handle_by_bus_id)(const char*, Device*) = nullptr;
  int (*memory)(Device, Memory*) = nullptr;
  int (*utilization)(Device, Utilization*) = nullptr;

  ~Library() {
    if (is_initialized) shutdown();
    if (handle != nullptr) dlclose(handle);
  }

  template <typename Function>
  bool Find(const char* name, Function* function) const {
    *function = reinterpret_cast<Function>(dlsym(handle, name));
    return *function != nullptr;
  }

  absl::Status Failed(const char* what, int code) const {
    const char* const text = error_string(code);
    return absl::UnavailableError(absl::StrCat("NVML ", what, ": ",
                                               text == nullptr ? "unknown error" : text, " (", code,
                                               "); GPU memory and load are not shown"));
  }
};

Nvml::Nvml(std::unique_ptr<Library> library) : library_(std::move(library)) {}
Nvml::~Nvml() = default;

absl::StatusOr<std::unique_ptr<Nvml>> Nvml::Open(const std::string& library,
                                                 const std::string& pci_bus_id) {
  auto opened = std::make_unique<Library>();
  opened->handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (opened->handle == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("no ", library,
                     " here; GPU memory and load are not shown. It comes with the driver; in a "
                     "container set NVIDIA_DRIVER_CAPABILITIES=compute,utility"));
  }
  if (!opened->Find("nvmlInit_v2", &opened->init) ||
      !opened->Find("nvmlShutdown", &opened->shutdown) ||
      !opened->Find("nvmlErrorString", &opened->error_string) ||
      !opened->Find("nvmlDeviceGetHandleByPciBusId_v2", &opened->handle_by_bus_id) ||
      !opened->Find("nvmlDeviceGetMemoryInfo", &opened->memory) ||
      !opened->Find("nvmlDeviceGetUtilizationRates", &opened->utilization)) {
    return absl::UnavailableError(
        absl::StrCat(library,
                     " lacks a function that we need; GPU memory and load are not shown. Install a "
                     "driver of this decade"));
  }
  int code = opened->init();
  if (code != kSuccess) return opened->Failed("does not start", code);
  opened->is_initialized = true;
  code = opened->handle_by_bus_id(pci_bus_id.c_str(), &opened->device);
  if (code != kSuccess) return opened->Failed("does not know our device", code);
  return std::unique_ptr<Nvml>(new Nvml(std::move(opened)));
}

absl::StatusOr<GpuReading> Nvml::Read() const {
  Memory memory{};
  int code = library_->memory(library_->device, &memory);
  if (code != kSuccess) return library_->Failed("does not tell the memory", code);
  Utilization utilization{};
  code = library_->utilization(library_->device, &utilization);
  if (code != kSuccess) return library_->Failed("does not tell the load", code);
  return GpuReading{.memory_bytes_used = memory.used,
                    .memory_bytes_free = memory.free,
                    .busy_ratio = utilization.gpu / 100.0};
}

}  // namespace fp8kvd::ops
