// AppendMessage of requests.h.
#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"

#include "server/translate/checks.h"
#include "server/translate/requests.h"
#include "server/translate/rows.h"

namespace fp8kvd::translate {

absl::Status AppendMessage::Check(const Catalog& catalog, absl::Span<const Piece> message,
                                  const Beside* beside) {
  absl::Status status = CheckAll(catalog, message, beside);
  if (status.ok()) return status;
  wire_ = WireAppend();
  std::vector<uint64_t>().swap(digests_);
  std::vector<int64_t>().swap(seq_lens_);
  return status;
}

absl::Status AppendMessage::CheckAll(const Catalog& catalog, absl::Span<const Piece> message,
                                     const Beside* beside) {
  absl::Status status = wire_.Read(message);
  if (!status.ok()) return status;
  if (beside != nullptr) {
    wire_.k.Set(beside->k);
    wire_.v.Set(beside->v);
  }
  const absl::StatusOr<int32_t> model = FindModel(catalog, wire_.model.kept, wire_.model.size);
  if (!model.ok()) return model.status();
  model_ = &catalog.models[*model];
  request_.emplace();
  request_->model = *model;
  if (!wire_.has_handle) {
    return Invalid("handle is missing; send one that CreateSequences or ForkSequences gave");
  }
  request_->handle = ToHandle(wire_.handle);
  status = CheckPlace(catalog);
  if (!status.ok()) return status;
  const ModelGeometry& geometry = model_->geometry;
  // n <= 2^24, layers <= 2^9, heads and head_dim <= 2^8 each, 2 bytes: below 2^50.
  const int64_t bytes = int64_t{request_->layers_count} * request_->n * geometry.kv_heads *
                        geometry.head_dim * kBf16Bytes;
  status = CheckKv(
      wire_.k.size, wire_.v.size, bytes,
      absl::StrCat(request_->layers_count, " layers x ", request_->n, " tokens x ",
                   geometry.kv_heads, " kv_heads x head_dim ", geometry.head_dim, " x 2 B"));
  if (!status.ok()) return status;
  slot_bytes_ = 2 * Aligned(bytes);
  if (slot_bytes_ > catalog.slot_bytes_max) {
    return Invalid("k and v hold ", 2 * bytes, " bytes, a chunk takes ", catalog.slot_bytes_max,
                   "; send smaller chunks (append_chunk_bytes_max of GetServerInfo)");
  }
  const auto first_layer = model_->slice_tokens.begin() + request_->layer;
  request_->slice_tokens = *std::min_element(first_layer, first_layer + request_->layers_count);
  streams_ =
      catalog.streams_rows && CanStream({&wire_.k, &wire_.v}, geometry.head_dim * kBf16Bytes);
  const int64_t slices = (request_->n + request_->slice_tokens - 1) / request_->slice_tokens;
  digests_.assign(request_->layers_count * slices, 0);
  seq_lens_.assign(request_->layers_count, 0);
  request_->slice_digests = digests_;
  request_->seq_lens = absl::MakeSpan(seq_lens_);
  return absl::OkStatus();
}

absl::Status AppendMessage::CheckPlace(const Catalog& catalog) {
  const ModelGeometry& geometry = model_->geometry;
  absl::Status status = CheckLayer(*model_, wire_.layer);
  if (!status.ok()) return status;
  const uint32_t layers_count = wire_.layers_count == 0 ? 1 : wire_.layers_count;
  if (layers_count > geometry.layers - wire_.layer) {
    return Invalid("layers_count is ", layers_count, ", from layer ", wire_.layer, " on model \"",
                   geometry.name, "\" has ", geometry.layers - wire_.layer,
                   "; send at most so many");
  }
  const uint64_t max = catalog.seq_len_max;
  if (wire_.pos > max || wire_.n > max - wire_.pos || wire_.skip_to > max) {
    return Invalid("pos ", wire_.pos, ", n ", wire_.n, " and skip_to ", wire_.skip_to,
                   " pass the longest sequence of ", max, " tokens; send positions below it");
  }
  if (wire_.n == 0) {
    return Invalid("n is 0, a chunk has at least 1 token, with skip_to too; send those at pos");
  }
  if (wire_.skip_to != 0 && wire_.skip_to != wire_.pos) {
    return Invalid("skip_to is ", wire_.skip_to, " and pos ", wire_.pos,
                   ", they must be equal; send the first position that you send as both");
  }
  for (uint32_t layer = wire_.layer; wire_.skip_to != 0 && layer < wire_.layer + layers_count;
       ++layer) {
    if (geometry.layer[layer].window == 0) {
      return Invalid("skip_to is ", wire_.skip_to, ", layer ", layer, " of model \"", geometry.name,
                     "\" has no window, so every position counts; send them all");
    }
  }
  request_->layer = static_cast<int32_t>(wire_.layer);
  request_->layers_count = static_cast<int32_t>(layers_count);
  request_->pos = static_cast<int64_t>(wire_.pos);
  request_->n = static_cast<int32_t>(wire_.n);
  request_->skip_to = static_cast<int64_t>(wire_.skip_to);
  return absl::OkStatus();
}

absl::Status AppendMessage::Load(uint8_t* slot) {
  uint8_t* const v_slot = slot + Aligned(wire_.k.size);
  request_->k = reinterpret_cast<const uint16_t*>(slot);
  request_->v = reinterpret_cast<const uint16_t*>(v_slot);
  if (!streams_) {
    wire_.k.CopyTo(slot);
    wire_.v.CopyTo(v_slot);
  }
  uint64_t* digest = digests_.data();
  for (int64_t layer = 0; layer < request_->layers_count; ++layer) {
    for (int64_t token = 0; token < request_->n; token += request_->slice_tokens) {
      const int64_t rows = std::min<int64_t>(request_->slice_tokens, request_->n - token);
      absl::Status status = LoadSlice(layer * request_->n + token, rows, digest);
      if (!status.ok()) return status;
      ++digest;
    }
  }
  if (streams_) FinishStreaming();
  return absl::OkStatus();
}

absl::Status AppendMessage::LoadSlice(int64_t first_row, int64_t rows, uint64_t* digest) {
  const ModelGeometry& geometry = model_->geometry;
  const int64_t row = int64_t{geometry.kv_heads} * geometry.head_dim;
  const absl::Span<const uint16_t> k(request_->k + first_row * row, rows * row);
  const absl::Span<const uint16_t> v(request_->v + first_row * row, rows * row);
  *digest = 0;
  for (const auto& [name, values, tensor] :
       {std::tuple("k", k, &wire_.k), std::tuple("v", v, &wire_.v)}) {
    std::optional<BadElement> bad;
    if (streams_) {
      *digest = StreamRows(tensor->pieces[0].data() + first_row * row * kBf16Bytes,
                           const_cast<uint16_t*>(values.data()), rows * row, *digest, &bad);
    } else {
      bad = FindBad(values);
    }
    if (bad.has_value()) {
      bad->index += first_row % request_->n * row;
      const absl::Status status = BadValue(name, *bad, row, geometry.head_dim);
      return Invalid("layer ", request_->layer + first_row / request_->n, ": ", status.message());
    }
  }
  if (!streams_) *digest = RowsDigest(k, v);
  return absl::OkStatus();
}

}  // namespace fp8kvd::translate
