// config/base/limits.h: every bound that a stranger's number meets, why it has that value, and the
// proof that the bounds hold together. A number from a client, a file or a flag becomes a size, an
// index or a loop bound only after it met one of these.
#pragma once

#include <cstdint>

namespace fp8kvd {

// Tokens of a page. The kernels' tiles, the block layout and the block tables are built on it.
inline constexpr int32_t kPageTokens = 64;

// Head dimensions for which kernels exist; config refuses others by name.
inline constexpr int32_t kHeadDims[] = {64, 80, 96, 128, 192, 256};
inline constexpr int32_t kHeadDimMax = 256;
inline constexpr int32_t kGroupMax = 16;  // q_heads / kv_heads, any integer 1..kGroupMax

inline constexpr int32_t kModelsMax = 64;
inline constexpr int32_t kLayersMax = 512;
inline constexpr int32_t kQHeadsMax = 1024;
inline constexpr int32_t kKvHeadsMax = 256;
static_assert(kKvHeadsMax <= kQHeadsMax, "a KV head serves at least one query head");

// Tokens of one sequence. 16 Mi is 16 times the longest context of a public model today.
inline constexpr int64_t kSeqLenMax = int64_t{1} << 24;
static_assert(kSeqLenMax <= INT32_MAX, "kernels count positions of one sequence in an int32");

// Pages of one pool: 1 Gi tokens at 64 a page. A table that names them all takes 64 MiB.
inline constexpr int64_t kPagesMax = int64_t{1} << 24;
static_assert(kPagesMax <= INT32_MAX, "a block table entry is an int32");

// All pools of a daemon together: 1 PiB. More is a mistake in a configuration.
inline constexpr int64_t kPoolBytesMax = int64_t{1} << 50;
static_assert(kPoolBytesMax < int64_t{1} << 53, "exact as a double, which ranges of options are");

// Each has a share of the queue, of staging memory and of the pools; a batch looks at all of them.
inline constexpr int32_t kTenantsMax = 64;

// Devices of one daemon: GPUs of one machine. Metrics and create calls look at each of them.
inline constexpr int32_t kDevicesMax = 16;

inline constexpr int64_t kSeqsMax = int64_t{1} << 20;

// Longest lease of an idle sequence: 30 days, so that a client's number never overflows a clock.
inline constexpr int64_t kLeaseTtlMsMax = int64_t{30} * 24 * 3600 * 1000;

// Query tokens of one item in one Decode. Speculative decoding proposes fewer than 16.
inline constexpr int32_t kQLenMax = 64;
// Items of one Decode message, and rows of one launch.
inline constexpr int32_t kItemsMax = 1024;
// Bytes of one gRPC message, tensors included.
inline constexpr int64_t kMessageBytesMax = int64_t{64} << 20;
// Chunk of an Append stream that the server asks clients to stay under.
inline constexpr int64_t kAppendChunkBytesMax = int64_t{16} << 20;
static_assert(kAppendChunkBytesMax < kMessageBytesMax, "a chunk and its fields fit one message");

// Both precisions refuse |q|, |k| or |v| >= 2^28: so scores stay below 2^70, and nothing that a
// kernel scales by powers of two leaves fp32.
inline constexpr int kRangeExponent = 28;

// e4m3fn: largest finite value, 0x7E. A row's scale is amax / kE4m3Max.
inline constexpr float kE4m3Max = 448.0F;

}  // namespace fp8kvd
