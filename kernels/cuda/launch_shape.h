// kernels/cuda/launch_shape.h: how many CTAs, warps and stages a decode launch gets. Nothing but
// speed depends on it: the kernels cut any amount of work over any shape, so a captured launch
// stays right when its rows' lengths change (not their query tokens or heads).
#pragma once

#include <cstdint>
#include <span>

#include "kernels/cuda/decode_table.h"

namespace fp8kvd::kernels::cuda {

struct DeviceLimits {
  int32_t multiprocessors;
  int32_t shared_per_multiprocessor;  // bytes
  int32_t shared_per_cta;             // the most that one may ask for
  bool one_warpgroup = false;         // CudaOptions
};

// Bytes of shared memory that each of so many CTAs of a multiprocessor may ask for.
int32_t SharedOfEach(const DeviceLimits& device, int32_t ctas);

// The work of a launch, summed over its rows.
struct LaunchWork {
  int64_t units;  // of the kernel
  int64_t items;  // batch_invariant: what may not be cut; else units
  int64_t pairs;
  int32_t items_max;  // of a pair
  int32_t row_pairs;  // pairs of each row, when nothing forbids a cut and all have as many; else 0
  int32_t columns;    // query columns of a pair, at most

  bool IsUniform() const { return pairs * items_max == items; }  // equally long pairs
};
LaunchWork WorkOfRows(std::span<const DecodeRow> rows, int32_t group, Grain grain,
                      bool batch_invariant);

// Whether each pair may get CTAs of its own (sm90/decode/pairs.cuh).
bool MayGoWhole(const DecodeKernel& kernel, const LaunchWork& work);

// work: WorkOfRows of these rows.
LaunchShape ShapeFor(const DecodeKernel& kernel, const DeviceLimits& device,
                     std::span<const DecodeRow> rows, int32_t group, const LaunchWork& work);

// batch_invariant: the pairs of a row whose pairs get a CTA each (ShapeOfPairsAlone), 0 where they
// are cut into items. Follows from the row alone.
int32_t PairsAlone(const DecodeKernel& kernel, const DecodeRow& row, int32_t group);
// For rows of so many pairs each, work without batch_invariant. What a pair's result is made of
// follows from the kernel and the device.
LaunchShape ShapeOfPairsAlone(const DecodeKernel& kernel, const DeviceLimits& device,
                              const LaunchWork& work);

// Pieces, and CTAs that share them, of any shape that ShapeFor gives on this device, at most.
int64_t ShapePiecesMax(const DeviceLimits& device);
int32_t ShapeCtasMax(const DeviceLimits& device);

}  // namespace fp8kvd::kernels::cuda
