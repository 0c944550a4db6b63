// kernels/cuda/nvtx.h: names a stretch of the calling thread for a profiler, where the toolkit has
// NVTX (headers alone; without a profiler a range costs a load).
#pragma once

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define FP8KVD_HAVE_NVTX 1
#else
#define FP8KVD_HAVE_NVTX 0
#endif

namespace fp8kvd::kernels::cuda {

class ProfilerRange {
 public:
#if FP8KVD_HAVE_NVTX
  explicit ProfilerRange(const char* name) { nvtxRangePushA(name); }
  ~ProfilerRange() { nvtxRangePop(); }
#else
  explicit ProfilerRange(const char* /*name*/) {}
  ~ProfilerRange() {}
#endif
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;
};

}  // namespace fp8kvd::kernels::cuda
