// tests/translate/rows.h: bf16 rows as the bytes of a message.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "server/translate/wire.h"

namespace fp8kvd::translate {

inline std::string Rows(int64_t elements, uint16_t first = 0x3F80) {
  std::vector<uint16_t> values(elements);
  for (int64_t i = 0; i < elements; ++i) values[i] = static_cast<uint16_t>(first + i % 100);
  return {reinterpret_cast<const char*>(values.data()), values.size() * 2};
}

inline void SetElement(std::string* rows, int64_t index, uint16_t value) {
  std::memcpy(rows->data() + index * 2, &value, 2);
}

// A field in pieces of so many bytes, each in memory of its own, where it begins at an odd address.
class CutField {
 public:
  CutField(const std::string& bytes, size_t piece_bytes) {
    for (size_t at = 0; at < bytes.size(); at += piece_bytes) {
      memory_.push_back("-" + bytes.substr(at, piece_bytes));
    }
    for (const std::string& piece : memory_) {
      pieces_.pieces.emplace_back(reinterpret_cast<const uint8_t*>(piece.data()) + 1,
                                  piece.size() - 1);
    }
    pieces_.size = static_cast<int64_t>(bytes.size());
  }
  const Pieces& pieces() const { return pieces_; }

 private:
  std::vector<std::string> memory_;
  Pieces pieces_;
};

}  // namespace fp8kvd::translate
