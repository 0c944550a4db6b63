// kernels/host_device.h: marks the few functions that both nvcc's device code and plain C++ call.
#pragma once

#if defined(__CUDACC__)
#define FP8KVD_HOST_DEVICE __host__ __device__
#else
#define FP8KVD_HOST_DEVICE
#endif
