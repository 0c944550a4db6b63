#include "kernels/cuda/decode_launches.h"

#include <algorithm>
#include <string>

#include "config/base/limits.h"
#include "kernels/cuda/uneven_pairs.h"

namespace fp8kvd::kernels::cuda {
namespace {

// The largest sum of units whose costs the kernels' 32-bit counters take.
constexpr int64_t kLaunchUnitsMax = ((int64_t{1} << 31) - 1) / CostOfPair(1);

constexpr int64_t kProgressBytes = 16;

// Of a row that no launch takes.
absl::Status TooLong(const LaunchWork& work, int64_t items_max) {
  const std::string row = work.units > kLaunchUnitsMax
                              ? "a row of " + std::to_string(work.units) +
                                    " units of keys, one launch takes " +
                                    std::to_string(kLaunchUnitsMax)
                              : "a row whose results are kept in " + std::to_string(work.items) +
                                    " pieces, as batch_invariant wants it, WarmUp made room for " +
                                    std::to_string(items_max);
  return absl::InvalidArgumentError(row + "; ask for fewer query tokens at once");
}

}  // namespace

void DecodeLaunches::Init(int32_t sm, const DeviceLimits& limits, cudaStream_t stream) {
  sm_ = sm;
  limits_ = limits;
  stream_ = stream;
  row_ways_.reserve(kItemsMax);
  sorted_rows_.reserve(kItemsMax);
  lengths_.reserve(kItemsMax);
  tokens_.reserve(kItemsMax);
  sorted_tokens_.reserve(kItemsMax);
}

absl::Status DecodeLaunches::CheckShape(const KernelShape& shape) const {
  const DecodeKernel* any = FindDecodeKernel(sm_, shape.precision, shape.head_dim, 1);
  if (any != nullptr && shape.group >= 1 && shape.group <= kGroupMax) return absl::OkStatus();
  std::string known;
  for (const DecodeKernel& kernel : DecodeTable()) {
    const std::string dim = std::to_string(kernel.head_dim);
    if (kernel.sm == sm_ && known.find(dim) == std::string::npos) known += " " + dim;
  }
  return absl::UnimplementedError("no kernel for head_dim " + std::to_string(shape.head_dim) +
                                  ", group " + std::to_string(shape.group) +
                                  "; there are kernels for head_dim" + known + ", groups 1 to " +
                                  std::to_string(kGroupMax));
}

absl::Status DecodeLaunches::Prepare(absl::Span<const KernelShape> shapes, int32_t q_len_max,
                                     int32_t q_heads_max, int64_t* allocations) {
  int64_t floats = 0;
  for (const KernelShape& shape : shapes) {
    if (absl::Status status = CheckShape(shape); !status.ok()) return status;
    for (const DecodeKernel& kernel : DecodeTable()) {
      if (kernel.sm != sm_ || kernel.precision != shape.precision ||
          kernel.head_dim != shape.head_dim) {
        continue;
      }
      const absl::Status status =
          ToStatus(kernel.prepare(limits_.shared_per_cta), "loading a decode kernel");
      if (!status.ok()) return status;
      const int32_t blocks = CeilDiv(q_len_max * shape.group, kernel.grain.columns);
      const int64_t kv_heads = q_heads_max / shape.group;
      const int64_t pieces =
          std::max(ShapePiecesMax(limits_), kv_heads * (int64_t{kInvariantItemsMax} + blocks));
      floats = std::max(floats, pieces * PieceFloats(kernel.grain.columns, kernel.head_dim));
    }
  }
  if (floats > piece_floats_) {
    auto pieces = AllocDevice(floats * int64_t{sizeof(float)});
    if (!pieces.ok()) return pieces.status();
    pieces_ = *std::move(pieces);
    piece_floats_ = floats;
    ++*allocations;
  }
  if (piece_flags_ == nullptr) {
    auto flags = AllocDevice(kProgressBytes + int64_t{ShapeCtasMax(limits_)} * 2 * 4);
    if (!flags.ok()) return flags.status();
    piece_flags_ = *std::move(flags);
    ++*allocations;
  }
  return absl::OkStatus();
}

absl::Status DecodeLaunches::Run(absl::Span<const DecodeRow> rows, const DecodeParams& params,
                                 StepPath path, bool may_mark) {
  if (params.batch_invariant) return RunInvariant(rows, params, path);
  int32_t columns_max = 0;
  for (const DecodeRow& row : rows) columns_max = std::max(columns_max, row.q_len * params.group);
  const DecodeKernel* kernel =
      FindDecodeKernel(sm_, params.precision, params.head_dim, columns_max);
  return DecodeRows(rows, params, *kernel, path, may_mark);
}

absl::Status DecodeLaunches::RunInvariant(absl::Span<const DecodeRow> rows,
                                          const DecodeParams& params, StepPath path) {
  row_ways_.clear();
  for (const DecodeRow& row : rows) {
    const DecodeKernel* kernel =
        FindDecodeKernel(sm_, params.precision, params.head_dim, row.q_len * params.group);
    row_ways_.push_back({kernel, PairsAlone(*kernel, row, params.group)});
  }
  constexpr RowWay kDone = {nullptr, 0};
  for (size_t first = 0; first < rows.size(); ++first) {
    const RowWay way = row_ways_[first];
    if (way == kDone) continue;
    sorted_rows_.clear();
    for (size_t i = first; i < rows.size(); ++i) {
      if (row_ways_[i] != way) continue;
      sorted_rows_.push_back(rows[i]);
      row_ways_[i] = kDone;
    }
    const absl::Status status =
        DecodeRows(sorted_rows_, params, *way.kernel, path, /*may_mark=*/false);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

int64_t DecodeLaunches::ItemsMax(const DecodeKernel& kernel, bool cut) const {
  return cut ? piece_floats_ / PieceFloats(kernel.grain.columns, kernel.head_dim) : kLaunchUnitsMax;
}

int64_t DecodeLaunches::RowsOfLaunch(absl::Span<const DecodeRow> rows, const DecodeParams& params,
                                     const DecodeKernel& kernel, bool cut) const {
  const int64_t items_max = ItemsMax(kernel, cut);
  int64_t units = 0;
  int64_t items = 0;
  int64_t count = 0;
  for (const DecodeRow& row : rows.subspan(0, kItemsMax)) {
    const LaunchWork work =
        WorkOfRows(absl::MakeConstSpan(&row, 1), params.group, kernel.grain, cut);
    units += work.units;
    items += work.items;
    if (count > 0 && (units > kLaunchUnitsMax || items > items_max)) break;
    ++count;
  }
  return count;
}

void DecodeLaunches::TakeTokens(absl::Span<const DecodeRow> rows,
                                absl::Span<const AppendRow>& appends) {
  for (const DecodeRow& row : rows) tokens_.push_back(TakeToken(row, appends));
}

absl::Status DecodeLaunches::AddTokens(DecodeArgs& args) {
  const auto at = inputs_->Upload(absl::MakeConstSpan(tokens_));
  if (!at.ok()) return at.status();
  args.tokens = *at;
  if (args.cache == CacheState::kSettled) args.cache = CacheState::kBelowQueries;
  return absl::OkStatus();
}

absl::Span<const DecodeRow> DecodeLaunches::LongestFirst(absl::Span<const DecodeRow> rows,
                                                         int32_t group, Grain grain) {
  lengths_.clear();
  for (size_t i = 0; i < rows.size(); ++i) {
    lengths_.push_back({WorkOf(rows[i], group, grain).units, static_cast<int32_t>(i)});
  }
  std::sort(lengths_.begin(), lengths_.end(), [](const RowLength& a, const RowLength& b) {
    return a.units != b.units ? a.units > b.units : a.index < b.index;
  });
  sorted_rows_.clear();
  sorted_tokens_.clear();
  for (const RowLength& length : lengths_) {
    sorted_rows_.push_back(rows[length.index]);
    if (!tokens_.empty()) sorted_tokens_.push_back(tokens_[length.index]);
  }
  tokens_.swap(sorted_tokens_);
  return sorted_rows_;
}

absl::Status DecodeLaunches::DecodeRows(absl::Span<const DecodeRow> rows,
                                        const DecodeParams& params, const DecodeKernel& kernel,
                                        StepPath path, bool may_mark) {
  // The same for all of batch_invariant's rows.
  const bool alone =
      params.batch_invariant && !rows.empty() && PairsAlone(kernel, rows.front(), params.group) > 0;
  const bool cut = params.batch_invariant && !alone;
  const bool is_near = path == StepPath::kNear && !params.batch_invariant &&
                       kernel.grain.columns <= NearRows::kColumnsMax;
  const absl::Span<const AppendRow> tokens =
      inputs_->left_tokens() ? inputs_->Kept() : absl::Span<const AppendRow>();
  absl::Span<const AppendRow> tokens_left = tokens;
  while (!rows.empty()) {
    auto some = rows.subspan(0, RowsOfLaunch(rows, params, kernel, cut));
    const LaunchWork work = WorkOfRows(some, params.group, kernel.grain, cut);
    const int64_t items_max = ItemsMax(kernel, cut);
    if (work.units > kLaunchUnitsMax || work.items > items_max) return TooLong(work, items_max);
    rows.remove_prefix(some.size());
    tokens_.clear();
    if (!tokens.empty()) TakeTokens(some, tokens_left);
    if (!params.batch_invariant && WantsLongestFirst(kernel, limits_, work)) {
      some = LongestFirst(some, params.group, kernel.grain);
    }
    DecodeArgs args{};
    NearRows near;
    if (is_near) {
      std::copy(some.begin(), some.end(), near.rows);
      args.near = &near;
    } else {
      const auto at = inputs_->Upload(some);
      if (!at.ok()) return at.status();
      args.rows = *at;
    }
    args.rows_count = static_cast<int32_t>(some.size());
    args.group = params.group;
    args.group_inverse = GroupInverse(params.group);
    args.out_type = params.out_type;
    args.batch_invariant = cut;
    args.cache = writes_->StateFor(some);
    if (!tokens.empty()) {
      if (absl::Status added = AddTokens(args); !added.ok()) return added;
    }
    args.pieces = reinterpret_cast<float*>(pieces_.get());
    args.progress = reinterpret_cast<uint32_t*>(piece_flags_.get());
    args.piece_flags = reinterpret_cast<uint32_t*>(piece_flags_.get() + kProgressBytes);
    const LaunchShape shape = alone ? ShapeOfPairsAlone(kernel, limits_, work)
                                    : ShapeFor(kernel, limits_, some, params.group, work);
    if (may_mark && rows.empty()) args.done = fences_->NextMark(shape.ctas);
    const absl::Status status = ToStatus(kernel.launch(args, shape, stream_), "decoding");
    if (!status.ok()) return status;
    inputs_->LaunchQueued();
    writes_->Decode();
    fences_->SetMarked(args.done.flags != nullptr);
  }
  if (tokens.empty()) return absl::OkStatus();
  writes_->Append(tokens);
  inputs_->TakeKept();
  return absl::OkStatus();
}

}  // namespace fp8kvd::kernels::cuda
