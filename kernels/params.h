// kernels/params.h: what one launch needs, as plain structs of pointers, strides and counts. Read
// by nvcc too, so no absl. One launch serves rows of many sequences, layers and models: all that
// they share is head_dim, group size, precision and output type.
//
// Bytes of a cache. A pool is an array of pages; page p of a pool starts at p * page_stride. A page
// holds, for each layer of its group, one block per KV head:
//     block(p, layer, kv_head) = pool + p * page_stride + (layer * kv_heads + kv_head) * BlockBytes
// What is inside a block is a backend's private matter (kernels/page_layout.h for what both share).
// `base` below is pool + layer * kv_heads * BlockBytes: callers make it once per row, kernels add
// the rest.
//
// Positions are 0-based tokens of one sequence. block_table[i] is the page index of tokens
// [64 i, 64 i + 64). Kernels read only entries that a visible or appended token needs; the others
// may hold anything. A page's tokens outside [window start, last query] are never read as numbers:
// they may hold NaN.
//
// Memory. q, k, v, out, lse and sink_logits lie in staging memory (Backend::AllocStaging), given as
// host addresses; block_table in table memory and base in pool memory, given as the backend's own
// addresses. On the CPU all are the same.
#pragma once

#include <cstdint>

#include "config/base/geometry.h"

namespace fp8kvd::kernels {

enum class OutType : uint8_t { kBf16 = 0, kFp32 = 1 };

// n tokens of one (sequence, layer), to be quantised and placed.
struct AppendRow {
  const uint16_t* k;           // [n, kv_heads, head_dim] bf16, row-major
  const uint16_t* v;           // as k
  const int32_t* block_table;  // covers [pos, pos + n)
  uint8_t* base;               // see above
  int64_t page_stride;         // bytes
  int32_t pos;                 // position of the first token
  int32_t n;                   // tokens, >= 1
  int32_t kv_heads;
};

struct AppendParams {
  const AppendRow* rows;  // [rows_count], distinct (sequence, layer, token) places
  int32_t rows_count;
  int32_t head_dim;
  Precision precision;
  bool is_brought = false;  // Backend::Bring has brought k and v
};

// q_len query tokens of one (sequence, layer). Query j stands at pos + j and sees keys
// max(0, pos + j - window + 1) .. pos + j (window 0: from 0). With no key, out is 0 and lse is
// -inf, or the sink.
struct DecodeRow {
  const uint16_t* q;         // [q_len, q_heads, head_dim] bf16
  void* out;                 // [q_len, q_heads, head_dim] bf16 or fp32
  float* lse;                // [q_len, q_heads] natural log of the denominator, or null
  const float* sink_logits;  // [q_heads], joins maximum and denominator only, or null
  const int32_t* block_table;
  const uint8_t* base;
  int64_t page_stride;  // bytes
  int32_t pos;          // position of the first query token; pos + q_len <= committed tokens
  int32_t q_len;        // >= 1
  int32_t kv_heads;     // q_heads = kv_heads * group
  int32_t window;       // 0: all
  float sm_scale;
  float softcap;  // 0: off
};

struct DecodeParams {
  const DecodeRow* rows;  // [rows_count]
  int32_t rows_count;
  int32_t head_dim;
  int32_t group;  // q_heads / kv_heads, 1..kGroupMax
  Precision precision;
  OutType out_type;
  bool batch_invariant;  // a row's bits do not depend on the other rows; may cost time
};

// Whole pages of one pool, copied in order (a page is no destination and source at once).
struct PageCopy {
  uint8_t* to;
  const uint8_t* from;
  int64_t bytes;
};

// One entry of a block table in table memory.
struct TableEdit {
  int32_t* at;
  int32_t page;
};

}  // namespace fp8kvd::kernels
