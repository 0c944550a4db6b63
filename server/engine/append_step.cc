#include "server/engine/append_step.h"

#include <algorithm>

#include "config/base/limits.h"

namespace fp8kvd::engine {
namespace {

// The place of a piece in its chunk.
struct Piece {
  int32_t layer_index;  // 0 .. layers_count - 1
  int32_t slice;        // along the tokens
  int32_t slices;
  int32_t first;  // token of the chunk
  int32_t n;
};

Piece PieceAt(const AppendRequest& request, int32_t piece) {
  Piece at{};
  at.slices = (request.n + request.slice_tokens - 1) / request.slice_tokens;
  at.layer_index = piece % request.layers_count;
  at.slice = piece / request.layers_count;
  at.first = at.slice * request.slice_tokens;
  at.n = std::min(request.slice_tokens, request.n - at.first);
  return at;
}

// Of the piece's rows in the chunk's k and v, in values.
int64_t OffsetOf(const AppendRequest& request, const Piece& piece, const LayerGroup& group) {
  return (int64_t{piece.layer_index} * request.n + piece.first) * group.kv_heads * group.head_dim;
}

int64_t KvBytes(const LayerGroup& group, int64_t tokens) {
  return KvBytesPerToken(Precision::kBf16, group.head_dim) * group.kv_heads * tokens;
}

}  // namespace

int32_t AppendSliceTokens(const config::EngineOptions& options,
                          const config::CacheOptions& cache_options, const ModelGeometry& geometry,
                          int32_t layer, int32_t layers_count) {
  int64_t tokens = kSeqLenMax;
  for (int32_t i = layer; i < layer + layers_count; ++i) {
    const LayerGroup& group = geometry.groups[geometry.layer[i].group];
    tokens = std::min(tokens, options.append_slice_bytes_max / KvBytes(group, 1));
    if (group.window > 0) {
      tokens = std::min(tokens, int64_t{group.window} + cache_options.reclaim_slack_tokens);
    }
  }
  return static_cast<int32_t>(std::max<int64_t>(tokens, 1));
}

int32_t AppendPieces(const AppendRequest& request) {
  const int64_t slices = (int64_t{request.n} + request.slice_tokens - 1) / request.slice_tokens;
  return static_cast<int32_t>(slices * request.layers_count);
}

AppendStep::AppendStep(const StepContext& context, AppendRows* appends)
    : context_(context), appends_(appends) {
  rows_.reserve(context.options.batch_rows_max);
}

const LayerGroup& AppendStep::GroupOf(const AppendRequest& request, int32_t piece) const {
  return context_.models[request.model].GroupOf(request.layer +
                                                PieceAt(request, piece).layer_index);
}

int32_t AppendStep::NextPieces(const AppendRequest& request) const {
  const int32_t left = request.book.waiting - request.pieces_coming;
  const int32_t first = request.pieces_done + request.pieces_coming;
  const Precision precision = GroupOf(request, first).precision;
  int64_t bytes_left = context_.options.append_slice_bytes_max;
  int32_t pieces = 0;
  for (; pieces < std::min(left, context_.options.batch_rows_max); ++pieces) {
    const LayerGroup& group = GroupOf(request, first + pieces);
    const int64_t bytes = KvBytes(group, PieceAt(request, first + pieces).n);
    if (pieces > 0 && (bytes > bytes_left || group.precision != precision)) break;
    bytes_left -= bytes;
  }
  return pieces;
}

absl::StatusOr<std::optional<kernels::BringId>> AppendStep::Bring(const AppendRequest& request,
                                                                  int32_t pieces) {
  const int32_t first = request.pieces_done + request.pieces_coming;
  rows_.clear();
  for (int32_t at = first; at < first + pieces; ++at) {
    const Piece piece = PieceAt(request, at);
    const LayerGroup& group = GroupOf(request, at);
    const int64_t offset = OffsetOf(request, piece, group);
    kernels::AppendRow row{};
    row.k = request.k + offset;
    row.v = request.v + offset;
    row.n = piece.n;
    row.kv_heads = group.kv_heads;
    rows_.push_back(row);
  }
  const LayerGroup& group = GroupOf(request, first);
  return context_.backend.Bring(kernels::AppendParams{.rows = rows_.data(),
                                                      .rows_count = pieces,
                                                      .head_dim = group.head_dim,
                                                      .precision = group.precision});
}

absl::Status AppendStep::Run(AppendRequest* request, int32_t pieces, bool is_brought,
                             bool* has_launched) {
  *has_launched = false;
  appends_->Begin();
  const LayerGroup& group = GroupOf(*request, request->pieces_done);
  for (int32_t i = 0; i < pieces; ++i) {
    const absl::StatusOr<AppendRows::Outcome> planned = PlanPiece(*request);
    if (!planned.ok()) {
      request->status = planned.status();
      if (absl::IsResourceExhausted(planned.status())) request->retry_after_ms = kRoomRetryMs;
      request->book.waiting = 0;
      break;
    }
    if (*planned == AppendRows::Outcome::kWait) break;
    ++request->pieces_done;
    --request->book.waiting;
  }
  if (appends_->empty()) return absl::OkStatus();
  *has_launched = true;
  ++context_.stats.append_launches_total;
  ++context_.stats.append_slices_total;
  return appends_->Launch(group.head_dim, group.precision, is_brought);
}

absl::StatusOr<AppendRows::Outcome> AppendStep::PlanPiece(const AppendRequest& request) {
  const absl::StatusOr<cache::SeqIndex> seq = context_.store.Find(request.handle, request.tenant);
  if (!seq.ok()) return seq.status();
  const Piece piece = PieceAt(request, request.pieces_done);
  const int32_t layer = request.layer + piece.layer_index;
  const LayerGroup& group = GroupOf(request, request.pieces_done);
  const int64_t offset = OffsetOf(request, piece, group);
  return appends_->Plan(
      AppendRows::Purpose::kStore, *seq,
      cache::AppendArgs{
          .layer = layer,
          .pos = request.pos + piece.first,
          .n = piece.n,
          .digest = request.slice_digests[piece.layer_index * piece.slices + piece.slice],
          .skip_to = piece.slice == 0 ? request.skip_to : 0},
      request.k + offset, request.v + offset);
}

}  // namespace fp8kvd::engine
