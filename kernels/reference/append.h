// kernels/reference/append.h: quantising as design and docs define it, one row at a time. Every
// backend's codes and scales equal these bit for bit. Written for reading; nothing here is fast.
#pragma once

#include <cstdint>

namespace fp8kvd::kernels::reference {

// One row of one (token, KV head): scale = largest magnitude / 448 in fp32, code = e4m3 of
// row / scale. A zero row has scale 0 and codes 0. Every finite bf16 row is taken.
// row and codes: [head_dim].
void QuantizeRow(const uint16_t* row, int32_t head_dim, uint8_t* codes, float* scale);

}  // namespace fp8kvd::kernels::reference
