// kernels/cpu/range.h: the check that every received row passes before it is admitted.
#pragma once

#include <cstdint>

namespace fp8kvd::kernels::cpu {

// Index of the first bf16 in values [count] that is not finite or whose magnitude is 2^28 or more
// (kRangeExponent), or -1 if there is none. Reads memory about as fast as it can be read.
int64_t FirstOutOfRange(const uint16_t* values, int64_t count);

}  // namespace fp8kvd::kernels::cpu
