// kernels/cuda/sm90/decode/join_share.h: which CTA of a cluster joins and writes which items of a
// pair (an item is four dimensions of a column). Runs of items go to the CTAs in turn, each so long
// that its results are a line of memory: results may lie beyond the bus, which takes a line at a
// time. Plain arithmetic, for host and device.
#pragma once

#include <cstdint>

#include "kernels/cuda/decode_work.h"
#include "kernels/host_device.h"

namespace fp8kvd::kernels::cuda {

struct JoinShare {
  static constexpr int32_t kRunBits = 4;  // 16 items: 128 bytes of bf16 results
  static constexpr int32_t kRun = 1 << kRunBits;

  int32_t cluster_bits;  // the cluster has 2^cluster_bits CTAs

  // The CTA that joins the item, and the item's place among those of that CTA: 0, 1, ...
  FP8KVD_HOST_DEVICE constexpr int32_t CtaOf(int32_t item) const {
    return (item >> kRunBits) & ((1 << cluster_bits) - 1);
  }
  FP8KVD_HOST_DEVICE constexpr int32_t PlaceOf(int32_t item) const {
    return ((item >> (kRunBits + cluster_bits)) << kRunBits) | (item & (kRun - 1));
  }
  // The other way round.
  FP8KVD_HOST_DEVICE constexpr int32_t ItemAt(int32_t cta, int32_t place) const {
    const int32_t run = ((place >> kRunBits) << cluster_bits) | cta;
    return (run << kRunBits) | (place & (kRun - 1));
  }

  // How many of `items` a CTA joins.
  FP8KVD_HOST_DEVICE constexpr int32_t CountOf(int32_t items, int32_t cta) const {
    const int32_t round_bits = kRunBits + cluster_bits;
    const int32_t left = items - ((items >> round_bits) << round_bits) - (cta << kRunBits);
    const int32_t of_last = left < 0 ? 0 : left < kRun ? left : kRun;
    return ((items >> round_bits) << kRunBits) + of_last;
  }
};

// Room for the places of any CTA.
FP8KVD_HOST_DEVICE constexpr int32_t JoinPlacesMax(int32_t items, int32_t cluster) {
  return CeilDiv(CeilDiv(items, JoinShare::kRun), cluster) * JoinShare::kRun;
}

}  // namespace fp8kvd::kernels::cuda
