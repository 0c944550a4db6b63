// Bytes as a Decode or an Append message, checked and loaded into a slot of exactly the size that
// was asked for. Beyond not breaking: what is accepted keeps to the model's shape and the limits,
// stands inside the slot, and holds no value that the kernels may not see; what is refused says
// why. The first byte chooses the message and how it is cut.
#include <cmath>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "config/base/check.h"
#include "config/base/limits.h"
#include "kernels/bf16.h"
#include "server/translate/requests.h"
#include "tests/fuzz/wire_agrees.h"
#include "tests/translate/catalog.h"

namespace fp8kvd::translate {
namespace {

// One byte too many, read or written, and the address sanitizer ends the run.
class Slot {
 public:
  explicit Slot(int64_t bytes) : bytes_(bytes), at_(new (kAlign) uint8_t[bytes]) {}
  uint8_t* at() const { return at_.get(); }
  void CheckHolds(const void* begin, int64_t bytes) const {
    const auto* from = static_cast<const uint8_t*>(begin);
    FP8KVD_CHECK(at_.get() <= from && from + bytes <= at_.get() + bytes_);
  }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Delete {
    void operator()(uint8_t* at) const { ::operator delete[](at, kAlign); }
  };
  const int64_t bytes_;
  std::unique_ptr<uint8_t[], Delete> at_;
};

void CheckRefusal(const absl::Status& status) {
  FP8KVD_CHECK(absl::IsInvalidArgument(status) || absl::IsNotFound(status));
  FP8KVD_CHECK(!status.message().empty());
}

void CheckRows(const Slot& slot, const uint16_t* rows, int64_t elements) {
  slot.CheckHolds(rows, elements * 2);
  for (int64_t i = 0; i < elements; ++i) {
    FP8KVD_CHECK(std::fabs(kernels::Bf16ToFloat(rows[i])) < 0x1p28F);  // false for NaN
  }
}

void CheckItem(const Catalog& catalog, const engine::DecodeRequest& request, const Slot& slot,
               const engine::DecodeItem& item) {
  const ModelGeometry& geometry = catalog.models[request.model].geometry;
  const int64_t q_row = int64_t{geometry.q_heads} * geometry.head_dim;
  const int64_t kv_row = int64_t{geometry.kv_heads} * geometry.head_dim;
  FP8KVD_CHECK(item.q_len >= 1 && item.q_len <= kQLenMax);
  FP8KVD_CHECK(item.pos >= 0 && item.pos + item.q_len <= catalog.seq_len_max);
  CheckRows(slot, request.q + item.row * q_row, item.q_len * q_row);
  if (request.k == nullptr) return;
  CheckRows(slot, request.k + item.row * kv_row, item.q_len * kv_row);
  CheckRows(slot, request.v + item.row * kv_row, item.q_len * kv_row);
}

void FuzzDecode(const Catalog& catalog, absl::Span<const Piece> pieces) {
  DecodeMessage message;
  if (const absl::Status status = message.Check(catalog, pieces); !status.ok()) {
    CheckRefusal(status);
    return;
  }
  FP8KVD_CHECK(message.slot_bytes() >= 0 && message.slot_bytes() <= catalog.slot_bytes_max);
  const Slot slot(message.slot_bytes());
  message.Load(slot.at());
  const engine::DecodeRequest& request = message.request();
  const ModelGeometry& geometry = catalog.models.at(request.model).geometry;
  FP8KVD_CHECK(request.layer >= 0 && request.layer < geometry.layers);
  FP8KVD_CHECK((request.k == nullptr) == (request.v == nullptr));
  slot.CheckHolds(request.out, message.tokens() * message.out_row_bytes());
  if (request.lse != nullptr) {
    slot.CheckHolds(request.lse, message.tokens() * geometry.q_heads * int64_t{sizeof(float)});
  }
  int64_t tokens = 0;
  for (const engine::DecodeItem& item : request.items) {
    FP8KVD_CHECK(item.row == tokens);
    tokens += item.q_len;
    if (item.status.ok()) {
      CheckItem(catalog, request, slot, item);
    } else {
      CheckRefusal(item.status);
    }
  }
  FP8KVD_CHECK(tokens == message.tokens());
}

void FuzzAppend(const Catalog& catalog, absl::Span<const Piece> pieces) {
  AppendMessage message;
  if (const absl::Status status = message.Check(catalog, pieces); !status.ok()) {
    CheckRefusal(status);
    return;
  }
  FP8KVD_CHECK(message.slot_bytes() >= 0 && message.slot_bytes() <= catalog.slot_bytes_max);
  const Slot slot(message.slot_bytes());
  if (const absl::Status status = message.Load(slot.at()); !status.ok()) {
    CheckRefusal(status);
    return;
  }
  const engine::AppendRequest& request = message.request();
  const ModelGeometry& geometry = catalog.models.at(request.model).geometry;
  FP8KVD_CHECK(request.layer >= 0 && request.layers_count >= 1);
  FP8KVD_CHECK(request.layer + request.layers_count <= geometry.layers);
  FP8KVD_CHECK(request.pos >= 0 && request.n >= 1);
  FP8KVD_CHECK(request.pos + request.n <= catalog.seq_len_max);
  FP8KVD_CHECK(request.slice_tokens >= 1);
  const int64_t slices = (request.n + request.slice_tokens - 1) / request.slice_tokens;
  FP8KVD_CHECK(static_cast<int64_t>(request.slice_digests.size()) == request.layers_count * slices);
  const int64_t elements =
      int64_t{request.layers_count} * request.n * geometry.kv_heads * geometry.head_dim;
  CheckRows(slot, request.k, elements);
  CheckRows(slot, request.v, elements);
}

}  // namespace
}  // namespace fp8kvd::translate

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  namespace translate = fp8kvd::translate;
  static const translate::Catalog catalog = translate::SmallCatalog();
  if (size == 0) return 0;
  const uint8_t choice = data[0];
  const std::vector<size_t> sizes = {choice % 3U, 1U + choice % 5U, 70U + choice % 16U};
  const std::vector<translate::Piece> pieces =
      translate::Cut(absl::Span<const uint8_t>(data + 1, size - 1), sizes);
  if ((choice & 0x80) != 0) {
    translate::FuzzAppend(catalog, pieces);
  } else {
    translate::FuzzDecode(catalog, pieces);
  }
  return 0;
}
