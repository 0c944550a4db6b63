// A libnvidia-ml.so.1 for the test of server/ops/nvml.h: one device, and faults that the
// environment asks for. Built as a library of its own, opened like the real one.
#include <cstdlib>
#include <cstring>

namespace {

bool Wants(const char* fault) {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): one thread
  const char* const asked = std::getenv("FAKE_NVML_FAULT");
  return asked != nullptr && std::strcmp(asked, fault) == 0;
}

struct Memory {
  unsigned long long total, free, used;  // NOLINT(google-runtime-int): of the real library
};
struct Utilization {
  unsigned int gpu, memory;
};
int device;

}  // namespace

extern "C" {
// NOLINTBEGIN(readability-identifier-naming): the real library's names
int nvmlInit_v2() { return Wants("init") ? 9 : 0; }
int nvmlShutdown() { return 0; }
const char* nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : "Not Found"; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, void** out) {
  if (std::strcmp(bus_id, "00000000:3b:00.0") != 0) return 6;
  *out = &device;
  return 0;
}
int nvmlDeviceGetMemoryInfo(void* of, Memory* memory) {
  if (of != &device || Wants("memory")) return 6;
  *memory = {150'000, 50'000, 100'000};
  return 0;
}
#ifndef FAKE_NVML_OLD
int nvmlDeviceGetUtilizationRates(void* of, Utilization* rates) {
  if (of != &device || Wants("utilization")) return 6;
  *rates = {73, 20};
  return 0;
}
#endif
// NOLINTEND(readability-identifier-naming)
}
