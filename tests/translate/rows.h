// tests/translate/rows.h: bf16 rows as the bytes of a message.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace fp8kvd::translate {

inline std::string Rows(int64_t elements, uint16_t first = 0x3F80) {
  std::vector<uint16_t> values(elements);
  for (int64_t i = 0; i < elements; ++i) values[i] = static_cast<uint16_t>(first + i % 100);
  return {reinterpret_cast<const char*>(values.data()), values.size() * 2};
}

inline void SetElement(std::string* rows, int64_t index, uint16_t value) {
  std::memcpy(rows->data() + index * 2, &value, 2);
}

}  // namespace fp8kvd::translate
