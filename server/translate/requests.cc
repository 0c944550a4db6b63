#include "server/translate/requests.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <tuple>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

#include "server/translate/checks.h"
#include "server/translate/rows.h"

namespace fp8kvd::translate {
namespace {

// Kernels count in powers of two: the largest floats would overflow there, and inf - inf is NaN.
constexpr float kSinkEnd = 0x1p28F;
static_assert(kRangeExponent == 28);

}  // namespace

absl::StatusOr<int32_t> FindModel(const Catalog& catalog, absl::string_view name,
                                  int64_t name_size) {
  const int32_t count = static_cast<int32_t>(catalog.models.size());
  if (name_size == 0 && count == 1) return 0;
  std::string known;
  for (int32_t i = 0; i < count; ++i) {
    const std::string& configured = catalog.models[i].geometry.name;
    if (static_cast<int64_t>(configured.size()) == name_size && configured == name) return i;
    if (i < 8) absl::StrAppend(&known, i == 0 ? "" : ", ", configured);
  }
  if (count > 8) absl::StrAppend(&known, " and ", count - 8, " more");
  if (name_size == 0) {
    return Invalid(
        "model is empty, which only means something where one model is configured; name "
        "one of: ",
        known);
  }
  return absl::NotFoundError(absl::StrCat("model \"", absl::CHexEscape(name.substr(0, 64)),
                                          name_size > 64 ? "..." : "",
                                          "\" is not configured; name one of: ", known));
}

cache::SeqHandle ToHandle(const WireHandle& handle) {
  return {.seq_id = cache::SeqId{handle.seq_id},
          .generation = handle.generation,
          .home = handle.home,
          .incarnation = handle.incarnation};
}

absl::Status DecodeMessage::Check(const Catalog& catalog, absl::Span<const Piece> message,
                                  const Beside* beside) {
  absl::Status status = CheckAll(catalog, message, beside);
  if (status.ok()) return status;
  const uint64_t request_id = wire_.request_id;
  wire_ = WireDecode();
  wire_.request_id = request_id;
  std::vector<engine::DecodeItem>().swap(items_);
  std::vector<engine::DecodeItem>().swap(unsorted_);
  std::vector<Origin>().swap(origins_);
  std::vector<int32_t>().swap(item_at_);
  std::vector<uint32_t>().swap(order_);
  return status;
}

absl::Status DecodeMessage::CheckAll(const Catalog& catalog, absl::Span<const Piece> message,
                                     const Beside* beside) {
  absl::Status status = wire_.Read(message);
  if (!status.ok()) return status;
  if (beside != nullptr) {
    wire_.q.Set(beside->q);
    wire_.k.Set(beside->k);
    wire_.v.Set(beside->v);
  }
  const absl::StatusOr<int32_t> model = FindModel(catalog, wire_.model.kept, wire_.model.size);
  if (!model.ok()) return model.status();
  model_index_ = *model;
  model_ = &catalog.models[*model];
  status = CheckLayer(*model_, wire_.layer);
  if (!status.ok()) return status;
  layer_ = static_cast<int32_t>(wire_.layer);
  status = CheckItems(catalog);
  if (!status.ok()) return status;
  status = CheckSinks();
  if (!status.ok()) return status;
  status = CheckTensors(catalog);
  if (!status.ok()) return status;
  Split(catalog);
  loading_ = Loading::kPieces;
  const auto tensors = {&std::as_const(wire_.q), &std::as_const(wire_.k), &std::as_const(wire_.v)};
  if (catalog.streams_rows && CanStream(tensors, model_->geometry.head_dim * kBf16Bytes)) {
    loading_ = Loading::kStream;
  } else if (origins_.empty() && AreWhole(tensors)) {
    loading_ = Loading::kRows;
  }
  return absl::OkStatus();
}

absl::Status DecodeMessage::CheckItems(const Catalog& catalog) {
  const int64_t count = wire_.handles.count;
  if (count < 1 || count > kItemsMax) {
    return Invalid("handles has ", count, " entries, a call takes 1 to ", kItemsMax,
                   "; split the batch");
  }
  if (wire_.positions.count != count) {
    return Invalid("positions has ", wire_.positions.count, " entries for ", count,
                   " handles; send one position for each");
  }
  if (wire_.q_lens.count != 0 && wire_.q_lens.count != count) {
    return Invalid("q_lens has ", wire_.q_lens.count, " entries for ", count,
                   " handles; send one for each, or none where all are 1");
  }
  items_.assign(count, {});
  tokens_ = 0;
  for (int64_t i = 0; i < count; ++i) {
    engine::DecodeItem& item = items_[i];
    const uint32_t q_len = wire_.q_lens.count == 0 ? 1 : wire_.q_lens.kept[i];
    if (q_len < 1 || q_len > static_cast<uint32_t>(kQLenMax)) {
      return Invalid("item ", i, ": q_lens is ", q_len, ", an item has 1 to ", kQLenMax,
                     " query tokens; split it");
    }
    item.handle = ToHandle(wire_.handles.kept[i]);
    item.q_len = static_cast<int32_t>(q_len);
    item.row = static_cast<int32_t>(tokens_);
    tokens_ += q_len;
    const uint64_t pos = wire_.positions.kept[i];
    if (pos > static_cast<uint64_t>(catalog.seq_len_max - q_len)) {
      item.status = Invalid("item ", i, ": positions is ", pos, ", with ", q_len,
                            " query tokens it may be 0 to ", catalog.seq_len_max - q_len,
                            "; send the position of the item's first query token");
    } else {
      item.pos = static_cast<int64_t>(pos);
    }
  }
  RefuseRepeated();
  return absl::OkStatus();
}

void DecodeMessage::RefuseRepeated() {
  if (items_.size() < 2) return;  // the sort below takes memory, even for one
  order_.resize(items_.size());
  std::iota(order_.begin(), order_.end(), 0U);
  const auto key = [this](uint32_t i) {
    const cache::SeqHandle& handle = items_[i].handle;
    return std::tuple(handle.seq_id, handle.generation, handle.home, handle.incarnation);
  };
  std::stable_sort(order_.begin(), order_.end(),
                   [&](uint32_t a, uint32_t b) { return key(a) < key(b); });
  for (size_t i = 1; i < order_.size(); ++i) {
    const uint32_t before = order_[i - 1];
    const uint32_t item = order_[i];
    if (key(before) == key(item) && items_[item].status.ok()) {
      items_[item].status =
          Invalid("item ", item, ": handles names the sequence of item ", before,
                  " again, a call takes a sequence once; send its tokens as one item with q_lens, "
                  "or in a call of their own");
    }
  }
}

absl::Status DecodeMessage::CheckSinks() {
  const ModelGeometry& geometry = model_->geometry;
  const bool has_sinks = geometry.layer[layer_].has_sinks;
  const int64_t count = wire_.sink_logits.count;
  if (!has_sinks && count != 0) {
    return Invalid("sink_logits has ", count, " entries, layer ", layer_, " of model \"",
                   geometry.name, "\" has no sinks; leave them out, or configure has_sinks");
  }
  if (has_sinks && count != geometry.q_heads && !(wire_.omit_sinks && count == 0)) {
    return Invalid("sink_logits has ", count, " entries, layer ", layer_, " of model \"",
                   geometry.name, "\" wants ", geometry.q_heads,
                   " (one for each query head); send them, or set omit_sinks");
  }
  for (int64_t i = 0; i < count; ++i) {
    const float sink = wire_.sink_logits.kept[i];
    if (!std::isfinite(sink)) {
      return Invalid("sink_logits[", i, "] is not finite; send finite logits, or set omit_sinks");
    }
    if (sink >= kSinkEnd) {
      return Invalid("sink_logits[", i, "] is ", sink, ", logits below ", kSinkEnd,
                     " (2^28) are allowed; q and k are bounded like that, too");
    }
  }
  return absl::OkStatus();
}

absl::Status DecodeMessage::CheckTensors(const Catalog& catalog) {
  const ModelGeometry& geometry = model_->geometry;
  // At most 1,024 items x 64 tokens x 1,024 heads x 256 x 4 bytes = 2^36: no product overflows.
  const int64_t q_bytes = tokens_ * geometry.q_heads * geometry.head_dim * kBf16Bytes;
  const int64_t kv_bytes = tokens_ * geometry.kv_heads * geometry.head_dim * kBf16Bytes;
  if (wire_.q.size != q_bytes) {
    return Invalid("q holds ", wire_.q.size, " bytes, this request wants ", q_bytes, " (", tokens_,
                   " query tokens x ", geometry.q_heads, " q_heads x head_dim ", geometry.head_dim,
                   " x 2 B); send bf16, all query heads");
  }
  const bool has_kv = wire_.k.size != 0 || wire_.v.size != 0;
  if (has_kv && (wire_.k.size != kv_bytes || wire_.v.size != kv_bytes)) {
    return CheckKv(
        wire_.k.size, wire_.v.size, kv_bytes,
        absl::StrCat(tokens_, " query tokens x ", geometry.kv_heads, " kv_heads x head_dim ",
                     geometry.head_dim, " x 2 B, or both empty to attend only"));
  }
  if (wire_.out_type < 0 || wire_.out_type > 2) {
    return Invalid("out_type is ", wire_.out_type,
                   "; send OUT_TYPE_BF16 (1), OUT_TYPE_FP32 (2) or nothing for bf16");
  }
  out_type_ = wire_.out_type == 2 ? kernels::OutType::kFp32 : kernels::OutType::kBf16;
  const int64_t element_bytes = out_type_ == kernels::OutType::kFp32 ? 4 : 2;
  out_row_bytes_ = geometry.q_heads * geometry.head_dim * element_bytes;
  lse_bytes_ = wire_.want_lse ? tokens_ * geometry.q_heads * 4 : 0;
  const int64_t reply_bytes = out_bytes() + lse_bytes_;
  const int64_t slot_bytes = SlotBytes(tokens_);
  if (reply_bytes > catalog.message_bytes_max || slot_bytes > catalog.slot_bytes_max) {
    return Invalid("out and lse would hold ", reply_bytes, " bytes and all tensors ", slot_bytes,
                   ", a call takes ", catalog.message_bytes_max, " and ", catalog.slot_bytes_max,
                   "; split the batch");
  }
  return absl::OkStatus();
}

int64_t DecodeMessage::SlotBytes(int64_t tokens) const {
  const ModelGeometry& geometry = model_->geometry;
  const int64_t q_bytes = tokens * geometry.q_heads * geometry.head_dim * kBf16Bytes;
  const int64_t kv_bytes =
      wire_.k.size == 0 ? 0 : tokens * geometry.kv_heads * geometry.head_dim * kBf16Bytes;
  const int64_t lse_bytes = wire_.want_lse ? tokens * geometry.q_heads * 4 : 0;
  return Aligned(q_bytes) + 2 * Aligned(kv_bytes) + Aligned(wire_.sink_logits.count * 4) +
         Aligned(tokens * out_row_bytes_) + lse_bytes;
}

engine::DecodePart& DecodeMessage::AddPart(int32_t device) {
  const size_t index = parts_.size();
  if (index == part_at_.size()) part_at_.emplace_back();
  engine::DecodePart& part = part_at_[index].emplace();
  part.device = device;
  part.request.model = model_index_;
  part.request.layer = layer_;
  part.request.out_type = out_type_;
  parts_.push_back(&part);
  return part;
}

void DecodeMessage::Split(const Catalog& catalog) {
  parts_.clear();
  origins_.clear();
  const auto device_of = [&catalog](const engine::DecodeItem& item) {
    return catalog.DeviceOf(item.handle.home);
  };
  const int32_t first = device_of(items_.front());
  if (std::all_of(items_.begin(), items_.end(),
                  [&](const engine::DecodeItem& item) { return device_of(item) == first; })) {
    engine::DecodePart& part = AddPart(first);
    part.slot_bytes = SlotBytes(tokens_);
    part.request.items = absl::MakeSpan(items_);
    return;
  }
  unsorted_.swap(items_);
  items_.clear();
  items_.reserve(unsorted_.size());  // parts have spans of it
  item_at_.resize(unsorted_.size());
  const auto devices = static_cast<int32_t>(catalog.devices.size());
  for (int32_t device = 0; device < devices; ++device) {
    const size_t begin = items_.size();
    int32_t tokens = 0;
    for (size_t i = 0; i < unsorted_.size(); ++i) {
      if (device_of(unsorted_[i]) != device) continue;
      item_at_[i] = static_cast<int32_t>(items_.size());
      engine::DecodeItem& item = items_.emplace_back(std::move(unsorted_[i]));
      origins_.push_back({.index = static_cast<int32_t>(i), .row = item.row});
      item.row = tokens;
      tokens += item.q_len;
    }
    if (items_.size() == begin) continue;
    engine::DecodePart& part = AddPart(device);
    part.slot_bytes = SlotBytes(tokens);
    part.request.items = absl::MakeSpan(items_).subspan(begin);
  }
}

void DecodeMessage::Load(size_t part, uint8_t* slot) {
  engine::DecodeRequest& request = parts_[part]->request;
  const engine::DecodeItem& last = request.items.back();
  const int64_t tokens = last.row + last.q_len;
  const auto place = [&](const Pieces& tensor) -> const uint16_t* {
    if (tensor.size == 0) return nullptr;
    uint8_t* const at = slot;
    const int64_t row_bytes = tensor.size / tokens_;
    slot += Aligned(tokens * row_bytes);
    if (loading_ != Loading::kPieces) {
      // BringItem copies each item's.
    } else if (origins_.empty()) {
      tensor.CopyTo(at);
    } else {
      RangeReader rows(&tensor);
      for (const engine::DecodeItem& item : request.items) {
        rows.Copy(RowOf(item) * row_bytes, item.q_len * row_bytes, at + item.row * row_bytes);
      }
    }
    return reinterpret_cast<const uint16_t*>(at);
  };
  request.q = place(wire_.q);
  request.k = place(wire_.k);
  request.v = place(wire_.v);
  const int64_t sink_bytes = wire_.sink_logits.count * 4;
  if (sink_bytes != 0 && !wire_.omit_sinks) {
    std::memcpy(slot, wire_.sink_logits.kept.data(), sink_bytes);
    request.sink_logits = reinterpret_cast<const float*>(slot);
  }
  slot += Aligned(sink_bytes);
  request.out = slot;
  slot += Aligned(tokens * out_row_bytes_);
  if (wire_.want_lse) request.lse = reinterpret_cast<float*>(slot);
  Fields fields{RangeReader(&wire_.q), RangeReader(&wire_.k), RangeReader(&wire_.v)};
  for (engine::DecodeItem& item : request.items) {
    if (!item.status.ok()) continue;
    if (loading_ == Loading::kPieces) {
      CheckItem(request, &item);
    } else {
      BringItem(request, &fields, &item);
    }
  }
  if (loading_ == Loading::kStream) FinishStreaming();
}

void DecodeMessage::Refuse(engine::DecodeItem* item, const char* name, const BadElement& bad,
                           int64_t row_elements) const {
  const absl::Status status = BadValue(name, bad, row_elements, model_->geometry.head_dim);
  const int64_t place = item - items_.data();
  item->status =
      Invalid("item ", origins_.empty() ? place : origins_[place].index, ": ", status.message());
}

void DecodeMessage::BringItem(const engine::DecodeRequest& request, Fields* fields,
                              engine::DecodeItem* item) const {
  const ModelGeometry& geometry = model_->geometry;
  const bool streams = loading_ == Loading::kStream;
  uint64_t digest = 0;
  const auto bring = [&](const char* name, RangeReader* field, const uint16_t* rows, int64_t heads,
                         bool is_digested) {
    if (rows == nullptr || !item->status.ok()) return;
    const int64_t row = heads * geometry.head_dim;
    const int64_t byte = RowOf(*item) * row * kBf16Bytes;
    uint16_t* const to = const_cast<uint16_t*>(rows) + item->row * row;
    std::optional<BadElement> bad;
    const int64_t count = item->q_len * row;
    if (streams && is_digested) {
      digest = StreamRows({field, byte}, to, count, digest, &bad);
    } else if (streams) {
      StreamRows({field, byte}, to, count, &bad);
    } else {
      const uint8_t* const from = field->Get(byte, count * kBf16Bytes, nullptr);  // in one piece
      if (is_digested) {
        digest = CopyRows(from, to, count, digest, &bad);
      } else {
        CopyRows(from, to, count, &bad);
      }
    }
    if (bad.has_value()) Refuse(item, name, *bad, row);
  };
  bring("q", &fields->q, request.q, geometry.q_heads, /*is_digested=*/false);
  bring("k", &fields->k, request.k, geometry.kv_heads, /*is_digested=*/true);
  bring("v", &fields->v, request.v, geometry.kv_heads, /*is_digested=*/true);
  item->kv_digest = digest;
}

void DecodeMessage::CheckItem(const engine::DecodeRequest& request,
                              engine::DecodeItem* item) const {
  const ModelGeometry& geometry = model_->geometry;
  const int64_t q_row = int64_t{geometry.q_heads} * geometry.head_dim;
  const int64_t kv_row = int64_t{geometry.kv_heads} * geometry.head_dim;
  const struct {
    const char* name;
    const uint16_t* rows;
    int64_t row_elements;
  } tensors[] = {{"q", request.q, q_row}, {"k", request.k, kv_row}, {"v", request.v, kv_row}};
  for (const auto& [name, rows, row_elements] : tensors) {
    if (rows == nullptr) continue;
    const std::optional<BadElement> bad =
        FindBad({rows + item->row * row_elements, static_cast<size_t>(item->q_len * row_elements)});
    if (bad.has_value()) return Refuse(item, name, *bad, row_elements);
  }
  if (request.k != nullptr) {
    const size_t elements = item->q_len * kv_row;
    item->kv_digest = RowsDigest({request.k + item->row * kv_row, elements},
                                 {request.v + item->row * kv_row, elements});
  }
}

}  // namespace fp8kvd::translate
