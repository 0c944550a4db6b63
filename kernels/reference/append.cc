#include "kernels/reference/append.h"

#include <algorithm>
#include <cmath>

#include "config/base/limits.h"
#include "kernels/bf16.h"
#include "kernels/e4m3.h"

namespace fp8kvd::kernels::reference {

void QuantizeRow(const uint16_t* row, int32_t head_dim, uint8_t* codes, float* scale) {
  float largest = 0.0F;
  for (int32_t i = 0; i < head_dim; ++i) {
    largest = std::max(largest, std::fabs(Bf16ToFloat(row[i])));
  }
  *scale = largest / kE4m3Max;
  for (int32_t i = 0; i < head_dim; ++i) {
    codes[i] = *scale == 0.0F ? uint8_t{0} : E4m3Encode(Bf16ToFloat(row[i]) / *scale);
  }
}

}  // namespace fp8kvd::kernels::reference
