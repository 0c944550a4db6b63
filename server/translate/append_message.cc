// AppendMessage of requests.h.
#include <algorithm>
#include <optional>
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
  BeginLoad(slot);
  absl::StatusOr<bool> has_more = true;
  while (has_more.ok() && *has_more) has_more = ContinueLoad();
  return has_more.status();
}

void AppendMessage::BeginLoad(uint8_t* slot) {
  uint8_t* const v_slot = slot + Aligned(wire_.k.size);
  request_->k = reinterpret_cast<const uint16_t*>(slot);
  request_->v = reinterpret_cast<const uint16_t*>(v_slot);
  loaded_ = 0;
  if (streams_) {
    if (!stream_.has_value()) stream_.emplace();
    from_k_.emplace(&wire_.k);
    from_v_.emplace(&wire_.v);
    has_keys_ = false;
    BeginStream(/*seed=*/0);
  } else {
    wire_.k.CopyTo(slot);
    wire_.v.CopyTo(v_slot);
  }
}

absl::StatusOr<bool> AppendMessage::ContinueLoad() {
  const auto slices = static_cast<int64_t>(digests_.size());
  if (streams_) {
    if (absl::Status status = ContinueStream(); !status.ok()) return status;
    if (loaded_ == slices) FinishStreaming();
  } else {
    absl::Status status = CheckSlice(SliceAt(loaded_), &digests_[loaded_]);
    if (!status.ok()) return status;
    ++loaded_;
  }
  return loaded_ < slices;
}

AppendMessage::Slice AppendMessage::SliceAt(int64_t index) const {
  const int64_t slices = static_cast<int64_t>(digests_.size()) / request_->layers_count;
  const int64_t token = index % slices * request_->slice_tokens;
  return {index / slices * request_->n + token,
          std::min<int64_t>(request_->slice_tokens, request_->n - token)};
}

// Of one token's K, or V.
int64_t AppendMessage::RowElements() const {
  return int64_t{model_->geometry.kv_heads} * model_->geometry.head_dim;
}

absl::Status AppendMessage::CheckSlice(const Slice& slice, uint64_t* digest) const {
  const int64_t row = RowElements();
  const absl::Span<const uint16_t> k(request_->k + slice.first_row * row, slice.rows * row);
  const absl::Span<const uint16_t> v(request_->v + slice.first_row * row, slice.rows * row);
  if (const auto bad = FindBad(k)) return BadRow("k", *bad, slice);
  if (const auto bad = FindBad(v)) return BadRow("v", *bad, slice);
  *digest = RowsDigest(k, v);
  return absl::OkStatus();
}

// Of K or V of the next slice.
void AppendMessage::BeginStream(uint64_t seed) {
  const int64_t row = RowElements();
  const Slice slice = SliceAt(loaded_);
  RangeReader& from = has_keys_ ? *from_v_ : *from_k_;
  const uint16_t* const to = has_keys_ ? request_->v : request_->k;
  stream_->Begin({&from, slice.first_row * row * kBf16Bytes},
                 const_cast<uint16_t*>(to) + slice.first_row * row, slice.rows * row, seed);
}

absl::Status AppendMessage::ContinueStream() {
  std::optional<BadElement> bad;
  const bool has_more = stream_->Continue(&bad);
  if (bad.has_value()) return BadRow(has_keys_ ? "v" : "k", *bad, SliceAt(loaded_));
  if (has_more) return absl::OkStatus();
  const uint64_t digest = stream_->digest();
  digests_[loaded_] = digest;  // of V in the end
  if (has_keys_) ++loaded_;
  has_keys_ = !has_keys_;
  if (loaded_ < static_cast<int64_t>(digests_.size())) BeginStream(has_keys_ ? digest : 0);
  return absl::OkStatus();
}

// The index of `bad` counts within the slice.
absl::Status AppendMessage::BadRow(const char* tensor, BadElement bad, const Slice& slice) const {
  const int64_t row = RowElements();
  bad.index += slice.first_row % request_->n * row;
  const absl::Status status = BadValue(tensor, bad, row, model_->geometry.head_dim);
  return Invalid("layer ", request_->layer + slice.first_row / request_->n, ": ", status.message());
}

}  // namespace fp8kvd::translate
