#include "tests/support/engine_calls.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

#include "config/base/check.h"
#include "tests/support/fake_backend.h"

namespace fp8kvd::testing {
namespace {

uint64_t Spread(uint64_t value) {
  value = (value ^ value >> 31) * 0xBF58476D1CE4E5B9u;
  value = (value ^ value >> 27) * 0x94D049BB133111EBu;
  return value ^ value >> 31;
}

int32_t OutBytes(kernels::OutType out_type) { return out_type == kernels::OutType::kFp32 ? 4 : 2; }

}  // namespace

engine::ModelSetup MakeModel(const ModelSpec& spec) {
  engine::ModelSetup setup;
  ModelGeometry& geometry = setup.geometry;
  geometry.name = spec.name;
  geometry.layers = static_cast<int32_t>(spec.windows.size());
  geometry.kv_heads = spec.kv_heads;
  geometry.q_heads = spec.kv_heads * spec.group;
  geometry.head_dim = spec.head_dim;
  geometry.sm_scale = 1.0F;
  for (int32_t i = 0; i < geometry.layers; ++i) {
    const int32_t window = spec.windows[i];
    auto group = std::find_if(geometry.groups.begin(), geometry.groups.end(),
                              [&](const LayerGroup& g) { return g.window == window; });
    if (group == geometry.groups.end()) {
      geometry.groups.push_back(LayerGroup{.kv_heads = spec.kv_heads,
                                           .head_dim = spec.head_dim,
                                           .window = window,
                                           .precision = spec.precision,
                                           .layers = {}});
      setup.group_pages.push_back(spec.pages);
      group = geometry.groups.end() - 1;
    }
    geometry.layer.push_back(
        LayerGeometry{.window = window,
                      .group = static_cast<int32_t>(group - geometry.groups.begin()),
                      .group_layer = static_cast<int32_t>(group->layers.size())});
    group->layers.push_back(i);
  }
  return setup;
}

void FillRow(RowKind kind, uint64_t id, int32_t layer, int32_t head, absl::Span<uint16_t> row) {
  uint64_t bits = Spread(id * 1'000'003 + static_cast<uint64_t>(layer) * 1'009 +
                         static_cast<uint64_t>(head) * 7 + static_cast<uint64_t>(kind));
  for (uint16_t& value : row) {
    value = static_cast<uint16_t>(bits & 0x3FFF);  // bf16 in [0, 2)
    bits = Spread(bits + 1);
  }
}

uint64_t DigestOf(absl::Span<const uint64_t> tokens, int32_t layer) {
  uint64_t digest = Spread(static_cast<uint64_t>(layer) + 1);
  for (const uint64_t token : tokens) digest = Spread(digest ^ token);
  return digest;
}

uint64_t ExpectedMark(const ModelGeometry& geometry, int32_t layer, int32_t q_head, uint64_t query,
                      absl::Span<const uint64_t> visible) {
  std::vector<uint16_t> k(geometry.head_dim);
  std::vector<uint16_t> v(geometry.head_dim);
  FillRow(RowKind::kQ, query, layer, q_head, absl::MakeSpan(k));
  uint64_t mark = MarkOfQuery(k.data(), geometry.head_dim, /*sink_logit=*/0.0F);
  const int32_t kv_head = q_head / geometry.group_size();
  for (const uint64_t token : visible) {
    FillRow(RowKind::kK, token, layer, kv_head, absl::MakeSpan(k));
    FillRow(RowKind::kV, token, layer, kv_head, absl::MakeSpan(v));
    mark = MarkToken(mark, k.data(), v.data(), geometry.head_dim);
  }
  return mark;
}

DecodeCall::DecodeCall(engine::Engine* engine, int32_t model, int32_t layer,
                       std::vector<ItemSpec> specs, kernels::OutType out_type)
    : engine_(engine), geometry_(engine->models()[model].geometry), specs_(std::move(specs)) {
  const int64_t q_values = int64_t{geometry_.q_heads} * geometry_.head_dim;
  const int64_t kv_values = int64_t{geometry_.kv_heads} * geometry_.head_dim;
  const bool is_appending = !specs_[0].tokens.empty();
  int32_t rows = 0;
  for (const ItemSpec& spec : specs_) {
    engine::DecodeItem item;
    item.handle = spec.handle;
    item.pos = spec.pos;
    item.q_len = static_cast<int32_t>(spec.queries.size());
    item.row = rows;
    item.kv_digest = DigestOf(spec.tokens, layer);
    items.push_back(item);
    rows += item.q_len;
  }
  const int64_t out_at = rows * (q_values + 2 * kv_values) * 2;
  slot_bytes_ = out_at + rows * (q_values * OutBytes(out_type) + geometry_.q_heads * 4);
  absl::StatusOr<engine::StagingSlot> slot = engine->staging().Acquire(slot_bytes_);
  FP8KVD_CHECK(slot.ok());
  slot_ = *slot;
  uint16_t* const q = reinterpret_cast<uint16_t*>(slot_.bytes);
  uint16_t* const k = q + rows * q_values;
  uint16_t* const v = k + rows * kv_values;
  for (size_t i = 0; i < specs_.size(); ++i) {
    for (int32_t j = 0; j < items[i].q_len; ++j) {
      const int64_t row = items[i].row + j;
      for (int32_t h = 0; h < geometry_.q_heads; ++h) {
        FillRow(
            RowKind::kQ, specs_[i].queries[j], layer, h,
            absl::Span<uint16_t>(q + row * q_values + h * geometry_.head_dim, geometry_.head_dim));
      }
      for (int32_t h = 0; is_appending && h < geometry_.kv_heads; ++h) {
        const int64_t at = row * kv_values + h * geometry_.head_dim;
        FillRow(RowKind::kK, specs_[i].tokens[j], layer, h,
                absl::Span<uint16_t>(k + at, geometry_.head_dim));
        FillRow(RowKind::kV, specs_[i].tokens[j], layer, h,
                absl::Span<uint16_t>(v + at, geometry_.head_dim));
      }
    }
  }
  request.done = &done_;
  request.model = model;
  request.layer = layer;
  request.items = absl::MakeSpan(items);
  request.q = q;
  request.k = is_appending ? k : nullptr;
  request.v = is_appending ? v : nullptr;
  request.out = slot_.bytes + out_at;
  request.lse =
      reinterpret_cast<float*>(slot_.bytes + out_at + rows * q_values * OutBytes(out_type));
  request.out_type = out_type;
}

DecodeCall::~DecodeCall() { engine_->staging().Release(slot_); }

absl::Status DecodeCall::Submit() { return engine_->Submit(&request); }

uint64_t DecodeCall::MarkOf(int32_t item, int32_t query, int32_t q_head) const {
  const int64_t row_bytes = int64_t{geometry_.head_dim} * OutBytes(request.out_type);
  const int64_t row = int64_t{items[item].row + query} * geometry_.q_heads + q_head;
  uint64_t mark = 0;
  std::memcpy(&mark, static_cast<const uint8_t*>(request.out) + row * row_bytes, sizeof(mark));
  return mark;
}

void DecodeCall::Scribble() const { std::memset(slot_.bytes, 0xA5, slot_bytes_); }

std::string DecodeCall::Check(int32_t item, absl::Span<const uint64_t> history) const {
  const int32_t window = geometry_.layer[request.layer].window;
  for (int32_t j = 0; j < items[item].q_len; ++j) {
    const int64_t last = items[item].pos + j;
    const int64_t first = window == 0 ? 0 : std::max<int64_t>(0, last - window + 1);
    if (last >= static_cast<int64_t>(history.size())) return absl::StrCat("no token at ", last);
    for (int32_t h = 0; h < geometry_.q_heads; ++h) {
      const uint64_t expected = ExpectedMark(geometry_, request.layer, h, specs_[item].queries[j],
                                             history.subspan(first, last - first + 1));
      if (MarkOf(item, j, h) != expected) {
        return absl::StrCat("item ", item, " query ", j, " head ", h, " layer ", request.layer,
                            " at position ", last, " saw other tokens");
      }
    }
  }
  return "";
}

AppendCall::AppendCall(engine::Engine* engine, int32_t model, int32_t layer, int32_t layers_count,
                       const cache::SeqHandle& handle, int64_t pos, std::vector<uint64_t> ids,
                       int64_t skip_to)
    : tokens(std::move(ids)), seq_lens(layers_count), engine_(engine) {
  const LayerGroup& group = engine->models()[model].GroupOf(layer);
  const int64_t n = static_cast<int64_t>(tokens.size());
  const int64_t values = layers_count * n * group.kv_heads * group.head_dim;
  slot_bytes_ = values * 2 * 2;
  absl::StatusOr<engine::StagingSlot> slot = engine->staging().Acquire(slot_bytes_);
  FP8KVD_CHECK(slot.ok());
  slot_ = *slot;
  uint16_t* k = reinterpret_cast<uint16_t*>(slot_.bytes);
  uint16_t* v = k + values;
  request.done = &done_;
  request.model = model;
  request.handle = handle;
  request.layer = layer;
  request.layers_count = layers_count;
  request.pos = pos;
  request.n = static_cast<int32_t>(n);
  request.skip_to = skip_to;
  request.k = k;
  request.v = v;
  request.slice_tokens = engine->AppendSliceTokens(model, layer, layers_count);
  for (int32_t l = layer; l < layer + layers_count; ++l) {
    for (const uint64_t token : tokens) {
      for (int32_t h = 0; h < group.kv_heads; ++h) {
        FillRow(RowKind::kK, token, l, h, absl::Span<uint16_t>(k, group.head_dim));
        FillRow(RowKind::kV, token, l, h, absl::Span<uint16_t>(v, group.head_dim));
        k += group.head_dim;
        v += group.head_dim;
      }
    }
    for (int64_t first = 0; first < n; first += request.slice_tokens) {
      digests_.push_back(
          DigestOf(absl::Span<const uint64_t>(tokens).subspan(first, request.slice_tokens), l));
    }
  }
  request.slice_digests = digests_;
  request.seq_lens = absl::MakeSpan(seq_lens);
}

AppendCall::~AppendCall() { engine_->staging().Release(slot_); }

absl::Status AppendCall::Submit() { return engine_->Submit(&request); }

void AppendCall::Scribble() const { std::memset(slot_.bytes, 0xA5, slot_bytes_); }

}  // namespace fp8kvd::testing
