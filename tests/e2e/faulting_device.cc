// The device of the daemon that device_fault_test breaks: what it is given stays in flight, and on
// SIGUSR1 it fails. --device=cpu works inside the call, as a CPU does; --device=cuda returns at
// once, so that pollers take the engine's turns. There are others, by number in --devices, that do
// all they are given but for one thing.
#include <atomic>
#include <csignal>
#include <cstdint>
#include <memory>

#include "server/device.h"
#include "tests/support/fake_backend.h"

namespace fp8kvd {
namespace {

std::atomic<bool> is_broken{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler sets it");

enum class Fault : char {
  kOnSignal = '0',
  kNever = '1',
  kAtWrite = '2',
  kAtTablesAfterWrite = '3'
};

class FaultingBackend final : public testing::FakeBackend {
 public:
  FaultingBackend(bool returns_at_once, Fault fault) : FakeBackend(returns_at_once), fault_(fault) {
    SetRecording(false);
  }
  absl::Status Decode(const kernels::DecodeParams& params) override {
    if (is_broken) return Failed();
    return FakeBackend::Decode(params);
  }
  absl::StatusOr<bool> Passed(kernels::FenceId fence) override {
    if (is_broken) return Failed();
    if (fault_ != Fault::kOnSignal) return FakeBackend::Passed(fence);
    return false;
  }
  absl::Status UpdateTables(absl::Span<const kernels::TableEdit> edits) override {
    return has_written_ && fault_ == Fault::kAtTablesAfterWrite ? Failed()
                                                                : FakeBackend::UpdateTables(edits);
  }
  absl::Status Write(uint8_t* pool_bytes, absl::Span<const uint8_t> host) override {
    has_written_ = true;
    return fault_ == Fault::kAtWrite ? Failed() : FakeBackend::Write(pool_bytes, host);
  }

 private:
  static absl::Status Failed() { return absl::InternalError("an unspecified launch failure"); }

  const Fault fault_;
  bool has_written_ = false;
};

}  // namespace

absl::StatusOr<Devices> MakeDevices(const config::EngineOptions& options) {
  std::signal(SIGUSR1, [](int) { is_broken = true; });
  const auto fault = options.devices.empty() ? Fault::kOnSignal : Fault{options.devices.front()};
  Devices devices;
  devices.all.emplace_back();
  devices.all.back().name = "faulting:0";
  devices.all.back().backend =
      std::make_unique<FaultingBackend>(options.device == config::DeviceChoice::kCuda, fault);
  return devices;
}

}  // namespace fp8kvd
