// The device of the daemon that device_fault_test breaks: what it is given stays in flight, and on
// SIGUSR1 it fails. --device=cpu works inside the call, as a CPU does; --device=cuda returns at
// once, so that pollers take the engine's turns.
#include <atomic>
#include <csignal>
#include <memory>

#include "server/device.h"
#include "tests/support/fake_backend.h"

namespace fp8kvd {
namespace {

std::atomic<bool> is_broken{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler sets it");

class FaultingBackend final : public testing::FakeBackend {
 public:
  explicit FaultingBackend(bool returns_at_once) : FakeBackend(returns_at_once) {
    SetRecording(false);
  }
  absl::Status Decode(const kernels::DecodeParams& params) override {
    if (is_broken) return Fault();
    return FakeBackend::Decode(params);
  }
  absl::StatusOr<bool> Passed(kernels::FenceId /*fence*/) override {
    if (is_broken) return Fault();
    return false;
  }

 private:
  static absl::Status Fault() { return absl::InternalError("an unspecified launch failure"); }
};

}  // namespace

absl::StatusOr<Devices> MakeDevices(const config::EngineOptions& options) {
  std::signal(SIGUSR1, [](int) { is_broken = true; });
  Devices devices;
  devices.all.emplace_back();
  devices.all.back().name = "faulting:0";
  devices.all.back().backend =
      std::make_unique<FaultingBackend>(options.device == config::DeviceChoice::kCuda);
  return devices;
}

}  // namespace fp8kvd
