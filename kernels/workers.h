// kernels/workers.h: threads that a CPU kernel is handed. kernels/ starts none of its own;
// server/engine/worker_pool.h implements this with a fixed pool.
#pragma once

#include <cstdint>

namespace fp8kvd::kernels {

class Workers {
 public:
  virtual ~Workers() = default;

  // Threads that take part in Run, the caller's included; >= 1 and constant.
  virtual int32_t threads() const = 0;

  // Calls task(context, i) once for every i in [0, threads()), each on a thread of its own, and
  // returns when all have returned. No allocation. One Run at a time.
  virtual void Run(void (*task)(void* context, int32_t thread), void* context) = 0;
};

}  // namespace fp8kvd::kernels
