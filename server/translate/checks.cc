#include "server/translate/checks.h"

#include <algorithm>
#include <utility>

namespace fp8kvd::translate {
namespace {

constexpr int64_t kAlignBytes = 256;  // of each tensor in a slot
// From here on a message is streamed into its slot. Below, its lines are still in the cache when
// the device asks for them.
constexpr int64_t kStreamBytesMin = int64_t{256} << 10;
constexpr int64_t kStreamAlignBytes = 32;

}  // namespace

int64_t Aligned(int64_t bytes) { return (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes; }

bool AreWhole(std::initializer_list<const Pieces*> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const Pieces* tensor) {
    if (tensor->size == 0) return true;
    // Its place in a message of gRPC may be odd.
    return tensor->pieces.size() == 1 &&
           reinterpret_cast<uintptr_t>(tensor->pieces[0].data()) % 2 == 0;
  });
}

bool CanStream(std::initializer_list<const Pieces*> tensors, int64_t row_bytes) {
  int64_t bytes = 0;
  for (const Pieces* const tensor : tensors) bytes += tensor->size;
  return bytes >= kStreamBytesMin && row_bytes % kStreamAlignBytes == 0;
}

absl::Status CheckLayer(const CatalogModel& model, uint32_t layer) {
  const ModelGeometry& geometry = model.geometry;
  if (layer < static_cast<uint32_t>(geometry.layers)) return absl::OkStatus();
  return Invalid("layer is ", layer, ", model \"", geometry.name, "\" has layers 0 to ",
                 geometry.layers - 1, "; send one of those");
}

absl::Status CheckKv(int64_t k_size, int64_t v_size, int64_t wanted, absl::string_view shape) {
  for (const auto& [name, size] : {std::pair("k", k_size), std::pair("v", v_size)}) {
    if (size != wanted) {
      return Invalid(name, " holds ", size, " bytes, this request wants ", wanted, " (", shape,
                     "); send k and v in bf16, all KV heads");
    }
  }
  return absl::OkStatus();
}

absl::Status BadValue(absl::string_view name, const BadElement& bad, int64_t row_elements,
                      int32_t head_dim) {
  const int64_t in_row = bad.index % row_elements;
  return Invalid(name, "[", bad.index / row_elements, ", ", in_row / head_dim, ", ",
                 in_row % head_dim, "] is ", bad.text,
                 ", values must be finite and below 2^28 in size; find where the model makes it");
}

}  // namespace fp8kvd::translate
