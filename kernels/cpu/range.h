// kernels/cpu/range.h: the check that every received row passes before it is admitted, alone or on
// the row's way to memory that a device reads.
#pragma once

#include <cstdint>

namespace fp8kvd::kernels::cpu {

// Index of the first bf16 in values [count] that is not finite or whose magnitude is 2^28 or more
// (kRangeExponent), or -1 if there is none. Reads memory about as fast as it can be read.
int64_t FirstOutOfRange(const uint16_t* values, int64_t count);

// Copies `from` to `to`, each element read once, and gives what FirstOutOfRange would of the copy.
// Where the rows come out of another processor's caches the check is free.
int64_t CopyInRange(const uint16_t* from, uint16_t* to, int64_t count);

// The same past the caches. `kept`, where not null, gets a copy in the caches, for who reads it
// next. For many kilobytes that another reads next: nothing that was in `to` is fetched, and a
// device need not ask the caches for them. After FinishCopies everybody sees it. What lies behind
// `from` is asked for ahead, as if it were copied next.
// Both copies begin at multiples of 32 bytes, `from` at any; count is a multiple of 16.
int64_t CopyPastCaches(const uint8_t* from, uint16_t* to, uint16_t* kept, int64_t count);
void FinishCopies();

}  // namespace fp8kvd::kernels::cpu
