// kernels/cuda/uneven_pairs.h: how a launch goes whose pairs are not equally long: its units cut
// evenly, or a CTA or a cluster for each pair, one after the other in the rows' order, wherever one
// is done. The cut ends everywhere at once, but its warps have parts of pairs, whose beginnings,
// ends and joins take long; whole pairs have none of that, but some may end late. An estimate in
// plain arithmetic, from times of an H200 (docs/performance.md).
#pragma once

#include <cstdint>
#include <span>

#include "kernels/cuda/launch_shape.h"

namespace fp8kvd::kernels::cuda {

struct PairWay {
  int32_t ctas;  // of a multiprocessor at once; 0: an even cut is sooner done
  int32_t warps;
};

// Of a launch that MayGoWhole. cluster: CTAs that a pair gets where each has a multiprocessor.
PairWay WayOfUnevenPairs(const DecodeKernel& kernel, const DeviceLimits& device,
                         std::span<const DecodeRow> rows, int32_t group, const LaunchWork& work,
                         int32_t cluster);

// Whether such rows had better come longest first, so that what begins last is soon done. Of many
// pairs no single one matters, and short ones do better beside long ones.
bool WantsLongestFirst(const DecodeKernel& kernel, const DeviceLimits& device,
                       const LaunchWork& work);

}  // namespace fp8kvd::kernels::cuda
