#include "kernels/cuda/staging_twins.h"

#include <utility>

namespace fp8kvd::kernels::cuda {

absl::StatusOr<uint8_t*> StagingTwins::Alloc(int64_t bytes) {
  auto host = AllocPinned(bytes);
  if (!host.ok()) return host.status();
  auto device = AllocDevice(bytes);
  if (!device.ok()) return device.status();
  blocks_.push_back({*std::move(host), *std::move(device), bytes});
  return blocks_.back().host.get();
}

}  // namespace fp8kvd::kernels::cuda
