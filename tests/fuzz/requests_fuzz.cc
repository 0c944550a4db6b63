// Bytes as every message that goes through translate, against a small geometry, on one device or
// on two, over which a decode is split. Beyond not breaking: what is accepted lies within the
// limits and in its slot, a refusal is one printable line, and neither takes more memory than the
// message's own size allows. The first byte chooses the message, how it is cut, and the devices.
#include <sanitizer/allocator_interface.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/strings/ascii.h"
#include "google/protobuf/stubs/logging.h"

#include "config/base/check.h"
#include "kernels/bf16.h"
#include "server/translate/control.h"
#include "server/translate/replies.h"
#include "server/translate/requests.h"
#include "server/translate/status.h"
#include "tests/fuzz/wire_agrees.h"
#include "tests/translate/catalog.h"

namespace fp8kvd::translate {
namespace {

// All that was asked of the heap so far, given back or not.
size_t bytes_asked = 0;
void CountMalloc(const volatile void*, size_t bytes) { bytes_asked += bytes; }
void CountFree(const volatile void*) {}

constexpr int64_t kBf16Bytes = 2;

// A protobuf of empty handles takes 48 bytes for each 2 of the message, vectors double as they
// grow, and a refusal has its text.
constexpr size_t kBytesPerByteMax = 128;
constexpr size_t kBytesOfAnyMax = 16384;

// A slot holds q, k and v as they came, and out in fp32 with lse: at most three times q.
constexpr int64_t kSlotPerByteMax = 4;
constexpr int64_t kSlotPaddingMax = 8 * 64;

void CheckRefusal(const absl::Status& status) {
  FP8KVD_CHECK(absl::IsInvalidArgument(status) || absl::IsNotFound(status));
  const grpc::Status sent = ToGrpc(status, /*retry_after_ms=*/0);
  FP8KVD_CHECK(!sent.error_message().empty() && sent.error_message().size() <= 2048);
  for (const char c : sent.error_message()) FP8KVD_CHECK(absl::ascii_isprint(c));
}

void CheckWithin(const void* part, int64_t bytes, const std::vector<uint8_t>& slot) {
  if (part == nullptr) return;
  const auto* const begin = static_cast<const uint8_t*>(part);
  FP8KVD_CHECK(begin >= slot.data() && begin + bytes <= slot.data() + slot.size());
}

// What kernels may see: finite and below 2^28.
void CheckValues(const uint16_t* rows, int64_t first, int64_t count) {
  for (int64_t i = first; rows != nullptr && i < first + count; ++i) {
    FP8KVD_CHECK(std::fabs(kernels::Bf16ToFloat(rows[i])) < 0x1p28F);  // false for NaN
  }
}

std::vector<uint8_t> Slot(const Catalog& catalog, int64_t slot_bytes, size_t message_bytes) {
  FP8KVD_CHECK(slot_bytes >= 0 && slot_bytes <= catalog.slot_bytes_max);
  FP8KVD_CHECK(slot_bytes <=
               kSlotPerByteMax * static_cast<int64_t>(message_bytes) + kSlotPaddingMax);
  return std::vector<uint8_t>(slot_bytes, 0xFF);
}

// One part of a decode: its values are checked, and nothing of it lies outside its slot.
int64_t TryPart(const Catalog& catalog, DecodeMessage& message, size_t part,
                std::vector<uint8_t>* slot) {
  message.Load(part, slot->data());
  const engine::DecodeRequest& request = message.parts()[part]->request;
  const ModelGeometry& geometry = catalog.models.at(request.model).geometry;
  FP8KVD_CHECK(request.layer >= 0 && request.layer < geometry.layers);
  const int64_t q_row = int64_t{geometry.q_heads} * geometry.head_dim;
  const int64_t kv_row = int64_t{geometry.kv_heads} * geometry.head_dim;
  FP8KVD_CHECK((request.k == nullptr) == (request.v == nullptr));
  int64_t row = 0;
  for (const engine::DecodeItem& item : request.items) {
    FP8KVD_CHECK(item.row == row && item.q_len >= 1 && item.q_len <= kQLenMax);
    row += item.q_len;
    if (!item.status.ok()) {
      CheckRefusal(item.status);
      continue;
    }
    CheckValues(request.q, item.row * q_row, item.q_len * q_row);
    CheckValues(request.k, item.row * kv_row, item.q_len * kv_row);
    CheckValues(request.v, item.row * kv_row, item.q_len * kv_row);
    FP8KVD_CHECK(item.pos >= 0 && item.pos + item.q_len <= catalog.seq_len_max);
  }
  CheckWithin(request.q, row * q_row * kBf16Bytes, *slot);
  CheckWithin(request.k, row * kv_row * kBf16Bytes, *slot);
  CheckWithin(request.v, row * kv_row * kBf16Bytes, *slot);
  CheckWithin(request.sink_logits, geometry.q_heads * int64_t{4}, *slot);
  CheckWithin(request.out, row * message.out_row_bytes(), *slot);
  CheckWithin(request.lse, row * geometry.q_heads * 4, *slot);
  return row;
}

void TryDecode(const Catalog& catalog, const std::vector<Piece>& pieces, size_t message_bytes) {
  static DecodeMessage& message = *new DecodeMessage;  // one serves many calls, as in a stream
  const size_t before = bytes_asked;
  const absl::Status status = message.Check(catalog, pieces);
  FP8KVD_CHECK(bytes_asked - before <= kBytesPerByteMax * message_bytes + kBytesOfAnyMax);
  if (!status.ok()) {
    CheckRefusal(status);
    return;
  }
  std::vector<std::vector<uint8_t>> slots;
  int64_t rows = 0;
  size_t items = 0;
  for (size_t i = 0; i < message.parts().size(); ++i) {
    slots.push_back(Slot(catalog, message.parts()[i]->slot_bytes, message_bytes));
    rows += TryPart(catalog, message, i, &slots.back());
    items += message.parts()[i]->request.items.size();
  }
  FP8KVD_CHECK(rows == message.tokens() && items == message.items());
  v1::DecodeResponse response;
  FP8KVD_CHECK(Parse(DecodeReply(message, /*now=*/0), &response));
  FP8KVD_CHECK(static_cast<int64_t>(response.out().size()) == rows * message.out_row_bytes());
}

void TryAppend(const Catalog& catalog, const std::vector<Piece>& pieces, size_t message_bytes) {
  static AppendMessage& message = *new AppendMessage;
  const size_t before = bytes_asked;
  absl::Status status = message.Check(catalog, pieces);
  FP8KVD_CHECK(bytes_asked - before <= kBytesPerByteMax * message_bytes + kBytesOfAnyMax);
  std::vector<uint8_t> slot;
  if (status.ok()) {
    slot = Slot(catalog, message.slot_bytes(), message_bytes);
    status = message.Load(slot.data());
  }
  if (!status.ok()) {
    CheckRefusal(status);
    return;
  }
  const engine::AppendRequest& request = message.request();
  const ModelGeometry& geometry = catalog.models.at(request.model).geometry;
  FP8KVD_CHECK(request.layer >= 0 && request.layers_count >= 1 &&
               request.layer + request.layers_count <= geometry.layers);
  FP8KVD_CHECK(request.pos >= 0 && request.n >= 1 &&
               request.pos + request.n <= catalog.seq_len_max);
  const int64_t slices = (request.n + request.slice_tokens - 1) / request.slice_tokens;
  FP8KVD_CHECK(static_cast<int64_t>(request.slice_digests.size()) == request.layers_count * slices);
  FP8KVD_CHECK(static_cast<int64_t>(request.seq_lens.size()) == request.layers_count);
  const int64_t elements =
      int64_t{request.layers_count} * request.n * geometry.kv_heads * geometry.head_dim;
  CheckWithin(request.k, elements * kBf16Bytes, slot);
  CheckWithin(request.v, elements * kBf16Bytes, slot);
  CheckValues(request.k, 0, elements);
  CheckValues(request.v, 0, elements);
}

// A request without tensors, answered by an engine that knows none of its handles.
template <typename Message, typename Response>
void TryControl(const Catalog& catalog, absl::Span<const uint8_t> bytes) {
  const size_t before = bytes_asked;
  Message from;
  if (!from.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return;
  absl::StatusOr<ControlRequestPtr> request = ToControl(catalog, from);
  FP8KVD_CHECK(bytes_asked - before <= kBytesPerByteMax * bytes.size() + kBytesOfAnyMax);
  if (!request.ok()) {
    CheckRefusal(request.status());
    return;
  }
  engine::ControlRequest& to = **request;
  FP8KVD_CHECK(to.count >= 1 && to.count <= kItemsMax);
  FP8KVD_CHECK(to.handles.size() <= static_cast<size_t>(kItemsMax));
  FP8KVD_CHECK(to.model >= -1 && to.model < static_cast<int32_t>(catalog.models.size()));
  FP8KVD_CHECK(to.expected_tokens >= 0 && to.expected_tokens <= catalog.seq_len_max);
  FP8KVD_CHECK(to.ttl_ms >= 0 && to.ttl_ms <= catalog.lease_ttl_ms_max);
  for (const int64_t seq_len : to.seq_lens) {
    FP8KVD_CHECK(seq_len >= 0 && seq_len <= catalog.seq_len_max);
  }
  to.item_status.assign(to.handles.size(), absl::NotFoundError("the handle names no sequence"));
  to.infos.assign(to.op == engine::ControlRequest::Op::kStat ? to.handles.size() : 0, {});
  Response response;
  ToReply(catalog, to, &response);
  FP8KVD_CHECK(response.ByteSizeLong() <= kBytesPerByteMax * bytes.size() + kBytesOfAnyMax);
}

void TryOne(uint8_t choice, absl::Span<const uint8_t> bytes) {
  static const Catalog& one = *new Catalog(SmallCatalog());
  static const Catalog& two = *new Catalog([] {
    Catalog of_two = SmallCatalog();
    of_two.devices.resize(2);
    return of_two;
  }());
  const Catalog& catalog = choice >= 128 ? two : one;
  const std::vector<Piece> pieces = Cut(bytes, {choice / 16U, 1U + choice / 4U, 4096U});
  switch (choice % 9) {
    case 0:
      return TryDecode(catalog, pieces, bytes.size());
    case 1:
      return TryAppend(catalog, pieces, bytes.size());
    case 2:
      return TryControl<v1::CreateSequencesRequest, v1::CreateSequencesResponse>(catalog, bytes);
    case 3:
      return TryControl<v1::ForkSequencesRequest, v1::ForkSequencesResponse>(catalog, bytes);
    case 4:
      return TryControl<v1::TruncateSequencesRequest, v1::TruncateSequencesResponse>(catalog,
                                                                                     bytes);
    case 5:
      return TryControl<v1::FreeSequencesRequest, v1::FreeSequencesResponse>(catalog, bytes);
    case 6:
      return TryControl<v1::RenewSequencesRequest, v1::RenewSequencesResponse>(catalog, bytes);
    case 7:
      return TryControl<v1::StatSequencesRequest, v1::StatSequencesResponse>(catalog, bytes);
    default:
      return TryControl<v1::ListSequencesRequest, v1::ListSequencesResponse>(catalog, bytes);
  }
}

}  // namespace
}  // namespace fp8kvd::translate

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  google::protobuf::SetLogHandler(nullptr);
  __sanitizer_install_malloc_and_free_hooks(fp8kvd::translate::CountMalloc,
                                            fp8kvd::translate::CountFree);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  fp8kvd::translate::TryOne(data[0], absl::Span<const uint8_t>(data + 1, size - 1));
  return 0;
}
