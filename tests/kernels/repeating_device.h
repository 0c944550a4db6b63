// tests/kernels/repeating_device.h: a device that keeps the launch of the case that it ran last, so
// that the same launch can be timed again and again.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "config/base/check.h"
#include "tests/kernels/backend_device.h"

namespace fp8kvd::kernels::cases {

class RepeatingDevice final : public BackendDevice {
 public:
  RepeatingDevice(Backend& backend, Sizes sizes)
      : BackendDevice(backend, sizes), backend_(backend) {}

  std::string Decode(const DecodeParams& params) override {
    rows_.assign(params.rows, params.rows + params.rows_count);
    params_ = params;
    params_.rows = rows_.data();
    return BackendDevice::Decode(params);
  }

  // Of a backend that runs a launch inside the call.
  double AgainMs() {
    const auto begin = std::chrono::steady_clock::now();
    FP8KVD_CHECK(backend_.Decode(params_).ok());
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    return took.count();
  }

 private:
  Backend& backend_;
  std::vector<DecodeRow> rows_;
  DecodeParams params_{};
};

}  // namespace fp8kvd::kernels::cases
