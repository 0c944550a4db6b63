// tests/kernels/cpu_ready.h: a CPU backend on threads of its own, warmed up for every shape.
#pragma once

#include <cstdint>
#include <vector>

#include "config/base/check.h"
#include "config/base/limits.h"
#include "kernels/cpu/backend.h"
#include "server/engine/worker_pool.h"
#include "tests/kernels/backend_device.h"

namespace fp8kvd::kernels::cpu {

inline std::vector<KernelShape> AllShapes() {
  std::vector<KernelShape> shapes;
  for (const int32_t head_dim : kHeadDims) {
    for (int32_t group = 1; group <= kGroupMax; ++group) {
      for (const Precision precision : {Precision::kBf16, Precision::kFp8Kv}) {
        shapes.push_back({head_dim, group, precision});
      }
    }
  }
  return shapes;
}

class ReadyCpu {
 public:
  explicit ReadyCpu(int32_t threads) : workers(threads), backend(&workers) {
    FP8KVD_CHECK(backend.WarmUp(AllShapes(), /*rows_max=*/512, kQLenMax, kQHeadsMax).ok());
  }

  engine::WorkerPool workers;
  CpuBackend backend;
};

}  // namespace fp8kvd::kernels::cpu
