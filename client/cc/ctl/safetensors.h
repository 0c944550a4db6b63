// client/cc/ctl/safetensors.h: reads a safetensors file: named tensors and string metadata.
// Promises: sizes, offsets and dtypes are checked before a byte of a tensor is touched, so a file
//   from a stranger gives an error and never a wild read.
// Does not manage: dtypes other than BF16, F32 and I32 (listed, but not readable); writing.
// Cost: holds the whole file in memory; a tensor read is one copy.
// Errors: NOT_FOUND without the file or tensor, INVALID_ARGUMENT for everything malformed.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace fp8kvd::ctl {

// Larger headers and files are refused: a capture is a few MB.
inline constexpr uint64_t kSafetensorsHeaderBytesMax = uint64_t{16} << 20;
inline constexpr uint64_t kSafetensorsFileBytesMax = uint64_t{4} << 30;

class Safetensors {
 public:
  static absl::StatusOr<Safetensors> Read(const std::string& path);
  static absl::StatusOr<Safetensors> Parse(std::string bytes);

  absl::StatusOr<std::string> Metadata(const std::string& key) const;

  // A tensor's elements; the file must hold it in that dtype and exactly that shape.
  absl::StatusOr<std::vector<uint16_t>> Bf16(const std::string& name,
                                             const std::vector<int64_t>& shape) const;
  absl::StatusOr<std::vector<float>> F32(const std::string& name,
                                         const std::vector<int64_t>& shape) const;
  absl::StatusOr<std::vector<int32_t>> I32(const std::string& name,
                                           const std::vector<int64_t>& shape) const;

 private:
  struct Tensor {
    std::string dtype;
    std::vector<int64_t> shape;
    uint64_t begin = 0;  // within the data, which starts at data_begin_
    uint64_t end = 0;
  };

  absl::Status ParseHeader(const std::string& json);
  template <typename T>
  absl::StatusOr<std::vector<T>> Elements(const std::string& name, const char* dtype,
                                          const std::vector<int64_t>& shape) const;

  std::string bytes_;
  uint64_t data_begin_ = 0;
  std::map<std::string, std::string> metadata_;
  std::map<std::string, Tensor> tensors_;
};

}  // namespace fp8kvd::ctl
