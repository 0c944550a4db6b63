#include "server/rpc/measure_job.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"

#include "kernels/reference/accuracy.h"
#include "server/rpc/control_job.h"
#include "server/translate/rows.h"

namespace fp8kvd::rpc {
namespace {

using kernels::reference::Accuracy;
using kernels::reference::AttentionRows;
using kernels::reference::RowsProfile;
using kernels::reference::Way;

constexpr size_t kMeasureBytesMax = size_t{16} << 20;  // a second of the reference's arithmetic
// Of K and of V each in a turn of the helper thread: some milliseconds of that arithmetic.
constexpr size_t kPieceBytes = size_t{32} << 10;
// Of steps x q_heads x tokens x head_dim: 32 steps at 2,048 tokens of a layer of 32 heads of 128.
// Five seconds, which are given up when the client goes; a step of 2,048 tokens takes 16 ms, and
// one of all products, were there a single step, half a second.
constexpr int64_t kMeasureProductsMax = int64_t{1} << 28;
// steps x q_heads x head_dim fits kMeasureBytesMax, so that times tokens cannot overflow.
static_assert(kMeasureBytesMax * kMeasureBytesMax <= std::numeric_limits<int64_t>::max());
constexpr float kSmScaleMax = 1024;  // as in a configuration
constexpr float kSoftcapMax = 1e6;

std::vector<uint16_t> ToRows(const std::string& bytes) {
  std::vector<uint16_t> rows(bytes.size() / sizeof(uint16_t));
  std::memcpy(rows.data(), bytes.data(), rows.size() * sizeof(uint16_t));
  return rows;
}

// before: elements of that name that were looked at already.
absl::Status CheckRange(const char* name, const std::vector<uint16_t>& rows, int64_t before) {
  const std::optional<translate::BadElement> bad = translate::FindBad(rows);
  if (!bad.has_value()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      name, ": element ", before + bad->index, " is ", bad->text,
      ", values must be finite and below 2^28 in size; find where the model makes it"));
}

void SetProfile(const RowsProfile& profile, v1::RowsProfile* to) {
  to->set_amax(profile.amax);
  to->set_amax_over_rms(profile.amax_over_rms);
  to->set_channel_amax_ratio(profile.channel_amax_ratio);
  to->set_subnormal(profile.subnormal);
  for (const kernels::reference::OutlierRow& row : profile.worst) {
    v1::OutlierRow& out = *to->add_worst();
    out.set_token(static_cast<uint32_t>(row.token));
    out.set_kv_head(static_cast<uint32_t>(row.kv_head));
    out.set_error(row.error);
    out.set_amax(row.amax);
  }
}

void SetAccuracy(const Accuracy& accuracy, v1::Accuracy* to) {
  for (int way = 0; way < kernels::reference::kWays; ++way) {
    const kernels::reference::WayError& error = accuracy.ways[way];
    v1::WayError& out = *to->add_ways();
    out.set_way(kernels::reference::WayName(static_cast<Way>(way)));
    out.set_op(error.op);
    out.set_op_worst_row(error.op_worst_row);
    out.set_k(error.k);
    out.set_v(error.v);
    out.set_saturated(error.saturated);
    out.set_subnormal(error.subnormal);
  }
  SetProfile(accuracy.k, to->mutable_k());
  SetProfile(accuracy.v, to->mutable_v());
  to->set_score_spread(accuracy.score_spread);
  to->set_effective_keys(accuracy.effective_keys);
}

}  // namespace

int64_t MeasureJob::tokens() const {
  return static_cast<int64_t>(request_.k().size()) /
         (int64_t{request_.kv_heads()} * request_.head_dim() * int64_t{sizeof(uint16_t)});
}

absl::Status MeasureJob::Read(grpc::ByteBuffer* bytes) {
  absl::Status status = ParseBounded(bytes, kMeasureBytesMax, &request_);
  if (status.ok()) status = CheckRows();
  if (status.ok() && request_.has_queries()) status = CheckQueries();
  if (status.ok() && request_.has_queries()) status = CheckQueryNumbers();
  const kernels::reference::RowsErrorSum none(static_cast<int32_t>(request_.head_dim()));
  rows_ = {{"k", &request_.k(), none}, {"v", &request_.v(), none}};
  bytes_measured_ = 0;
  return status;
}

absl::Status MeasureJob::CheckRows() const {
  const uint32_t kv_heads = request_.kv_heads();
  if (kv_heads < 1 || kv_heads > static_cast<uint32_t>(kKvHeadsMax)) {
    return absl::InvalidArgumentError(absl::StrCat("kv_heads is ", kv_heads, ", allowed are 1 to ",
                                                   kKvHeadsMax, "; send the model's"));
  }
  const auto is_head_dim = [this](int32_t dim) {
    return static_cast<uint32_t>(dim) == request_.head_dim();
  };
  if (std::none_of(std::begin(kHeadDims), std::end(kHeadDims), is_head_dim)) {
    return absl::InvalidArgumentError(
        absl::StrCat("head_dim is ", request_.head_dim(),
                     ", kernels exist for 64, 80, 96, 128, 192 and 256; send one of those"));
  }
  const size_t token_bytes = size_t{kv_heads} * request_.head_dim() * sizeof(uint16_t);
  const size_t size = request_.k().size();
  if (size == 0 || size % token_bytes != 0 || request_.v().size() != size) {
    return absl::InvalidArgumentError(
        absl::StrCat("k holds ", size, " bytes and v ", request_.v().size(),
                     ", they must be equal and a multiple of ", token_bytes, " (", kv_heads,
                     " kv_heads x head_dim ", request_.head_dim(), " x 2 B); send whole tokens"));
  }
  return absl::OkStatus();
}

absl::Status MeasureJob::CheckQueries() const {
  const v1::AttentionQueries& queries = request_.queries();
  const uint32_t kv_heads = request_.kv_heads();
  const uint32_t q_heads = queries.q_heads();
  if (q_heads < kv_heads || q_heads % kv_heads != 0 || q_heads / kv_heads > kGroupMax) {
    return absl::InvalidArgumentError(absl::StrCat("q_heads is ", q_heads, ", allowed are 1 to ",
                                                   kGroupMax, " for each of the ", kv_heads,
                                                   " kv_heads; send the model's"));
  }
  const size_t steps = static_cast<size_t>(queries.positions_size());
  const size_t q_bytes = size_t{q_heads} * request_.head_dim() * sizeof(uint16_t);
  if (steps == 0 || queries.q().size() / q_bytes != steps || queries.q().size() % q_bytes != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("q holds ", queries.q().size(), " bytes, ", steps, " positions want ", q_bytes,
                     " each (", q_heads, " q_heads x head_dim ", request_.head_dim(),
                     " x 2 B); send at least one, and a position for each"));
  }
  uint32_t before = 0;
  for (int step = 0; step < queries.positions_size(); ++step) {
    const uint32_t position = queries.positions(step);
    if (position < before || int64_t{position} >= tokens()) {
      return absl::InvalidArgumentError(
          absl::StrCat("positions[", step, "] is ", position, ", allowed are ", before, " to ",
                       tokens() - 1, "; send the queries in order, of tokens that k has"));
    }
    before = position;
  }
  const int64_t products = static_cast<int64_t>(queries.q().size() / sizeof(uint16_t)) * tokens();
  if (products > kMeasureProductsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(steps, " steps x ", q_heads, " q_heads x ", tokens(), " tokens x head_dim ",
                     request_.head_dim(), " are ", products, " products, at most ",
                     kMeasureProductsMax, " are computed in one call; send fewer steps or tokens"));
  }
  return absl::OkStatus();
}

absl::Status MeasureJob::CheckQueryNumbers() const {
  const v1::AttentionQueries& queries = request_.queries();
  const float sm_scale = queries.sm_scale();
  if (queries.has_sm_scale() && !(sm_scale > 0 && sm_scale <= kSmScaleMax)) {
    return absl::InvalidArgumentError(
        absl::StrCat("sm_scale is ", sm_scale, ", allowed is above 0 to ", kSmScaleMax,
                     "; send the model's, or none for 1/sqrt(head_dim)"));
  }
  if (queries.window() > static_cast<uint32_t>(kSeqLenMax)) {
    return absl::InvalidArgumentError(
        absl::StrCat("window is ", queries.window(), ", at most ", kSeqLenMax,
                     " tokens are a sequence; send the layer's, or 0 for all"));
  }
  const float softcap = queries.softcap();
  if (!(softcap >= 0 && softcap <= kSoftcapMax)) {
    return absl::InvalidArgumentError(absl::StrCat("softcap is ", softcap, ", allowed are 0 to ",
                                                   kSoftcapMax,
                                                   "; send the layer's, or 0 for none"));
  }
  return absl::OkStatus();
}

absl::Status MeasureJob::Measure(Rows& rows, size_t bytes) const {
  std::vector<uint16_t> piece(bytes / sizeof(uint16_t));
  std::memcpy(piece.data(), rows.bytes->data() + bytes_measured_, bytes);
  absl::Status status =
      CheckRange(rows.name, piece, static_cast<int64_t>(bytes_measured_ / sizeof(uint16_t)));
  if (status.ok()) rows.sum.Add(piece);
  return status;
}

absl::StatusOr<bool> MeasureJob::Compute() {
  if (bytes_measured_ == request_.k().size()) return ContinueAttention();
  const size_t row_bytes = request_.head_dim() * sizeof(uint16_t);
  const size_t bytes =
      std::min(kPieceBytes / row_bytes * row_bytes, request_.k().size() - bytes_measured_);
  for (Rows& rows : rows_) {
    absl::Status status = Measure(rows, bytes);
    if (!status.ok()) return status;
  }
  bytes_measured_ += bytes;
  if (bytes_measured_ < request_.k().size()) return true;
  response_.Clear();
  response_.set_k_error(rows_[0].sum.overall());
  response_.set_v_error(rows_[1].sum.overall());
  response_.set_k_error_worst_row(rows_[0].sum.worst_row());
  response_.set_v_error_worst_row(rows_[1].sum.worst_row());
  response_.set_tokens(static_cast<uint64_t>(tokens()));
  return request_.has_queries();
}

void MeasureJob::Forget() {
  v1::MeasureKvErrorRequest().Swap(&request_);
  if (!attention_.has_value()) return;
  attention_.reset();
  parts().measuring->GiveRoomBack();
}

absl::StatusOr<bool> MeasureJob::ContinueAttention() {
  if (!attention_.has_value()) {
    if (!parts().measuring->TakeRoom(this)) return true;
    if (absl::Status status = BeginAttention(); !status.ok()) {
      parts().measuring->GiveRoomBack();
      return status;
    }
  }
  if (attention_->Continue()) return true;
  SetAccuracy(attention_->accuracy(), response_.mutable_accuracy());
  return false;
}

absl::Status MeasureJob::BeginAttention() {
  const v1::AttentionQueries& queries = request_.queries();
  const auto head_dim = static_cast<int32_t>(request_.head_dim());
  AttentionRows rows{.k = ToRows(request_.k()),
                     .v = ToRows(request_.v()),
                     .q = ToRows(queries.q()),
                     .positions = {queries.positions().begin(), queries.positions().end()},
                     .kv_heads = static_cast<int32_t>(request_.kv_heads()),
                     .group = static_cast<int32_t>(queries.q_heads() / request_.kv_heads()),
                     .head_dim = head_dim,
                     .window = static_cast<int32_t>(queries.window()),
                     .sm_scale = queries.has_sm_scale()
                                     ? queries.sm_scale()
                                     : 1.0F / std::sqrt(static_cast<float>(head_dim)),
                     .softcap = queries.softcap()};
  if (absl::Status status = CheckRange("q", rows.q, 0); !status.ok()) return status;
  attention_.emplace(std::move(rows));
  return absl::OkStatus();
}

}  // namespace fp8kvd::rpc
