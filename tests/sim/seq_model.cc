#include "tests/sim/seq_model.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace fp8kvd::testing {

SeqModel::SeqModel(const cache::SeqHandle& handle, int32_t model, const ModelGeometry* geometry,
                   int64_t expected_tokens, int64_t ttl_ms, int64_t now_us)
    : hoped(geometry->layers, 0),
      handle_(handle),
      model_(model),
      geometry_(geometry),
      expected_tokens_(expected_tokens),
      ttl_ms_(ttl_ms),
      touched_us_(now_us),
      history_(geometry->layers) {}

SeqModel SeqModel::Child(const cache::SeqHandle& handle, int64_t expected_tokens, int64_t now_us) {
  has_shared_ = true;
  SeqModel child = *this;
  child.handle_ = handle;
  child.expected_tokens_ = expected_tokens;
  child.touched_us_ = now_us;
  child.calls_in_flight = 0;
  child.is_exclusive = false;
  child.ForgetHopes();
  return child;
}

void SeqModel::ForgetHopes() {
  for (int32_t layer = 0; layer < geometry_->layers; ++layer) hoped[layer] = Length(layer);
}

void SeqModel::Lives(const CallFacts& facts) {
  if (facts.submitted_us >= ended_before_us_) ended_before_us_ = -1;
}

bool SeqModel::Holds(int32_t layer, int64_t pos, absl::Span<const uint64_t> tokens) const {
  const std::vector<uint64_t>& history = history_[layer];
  return pos + static_cast<int64_t>(tokens.size()) <= Length(layer) &&
         std::equal(tokens.begin(), tokens.end(), history.begin() + pos);
}

std::string SeqModel::JudgeFailure(const CallFacts& facts, const absl::Status& status,
                                   int32_t layer, int64_t pos, int64_t n, bool is_append) {
  const int64_t length = Length(layer);
  const bool is_windowed = geometry_->layer[layer].window > 0;
  bool is_possible = false;
  switch (status.code()) {
    case absl::StatusCode::kNotFound:
      is_possible = is_gone_ || ended_before_us_ >= 0;
      is_gone_ = true;
      break;
    case absl::StatusCode::kCancelled:
      is_possible = facts.was_cancelled;
      break;
    case absl::StatusCode::kDeadlineExceeded:
      is_possible = facts.may_be_late;
      break;
    case absl::StatusCode::kOutOfRange:
      is_possible = pos + n > length && !(is_append && pos == length);
      break;
    case absl::StatusCode::kAlreadyExists:
      is_possible = is_append && pos < length;  // of a piece of it at least
      break;
    case absl::StatusCode::kFailedPrecondition:
      is_possible = is_windowed || (is_append && pos < length);
      break;
    case absl::StatusCode::kResourceExhausted:
      is_possible = is_append && pos + n > expected_tokens_;
      break;
    case absl::StatusCode::kInvalidArgument:
      is_possible = is_append && pos + n > kSeqLenMax;
      break;
    default:
      break;
  }
  if (is_possible) return "";
  return absl::StrCat("layer ", layer, " of length ", length, ", ", is_append ? "append" : "query",
                      " at ", pos, " of ", n, " is answered ", status.ToString());
}

std::string SeqModel::JudgeItem(const CallFacts& facts, const DecodeCall& call, int32_t item,
                                absl::Span<const uint64_t> tokens) {
  const int32_t layer = call.request.layer;
  const engine::DecodeItem& asked = call.items[item];
  const absl::Status& status = call.request.status.ok() ? asked.status : call.request.status;
  const bool is_append = !tokens.empty();
  if (!status.ok()) {
    if (absl::IsAlreadyExists(status) && Holds(layer, asked.pos, tokens)) {
      return "the very bytes that are there are refused as others";
    }
    return JudgeFailure(facts, status, layer, asked.pos, asked.q_len, is_append);
  }
  if (is_gone_) return "a sequence that is gone answers";
  Lives(facts);
  std::vector<uint64_t>& history = history_[layer];
  if (is_append && asked.pos == Length(layer)) {
    history.insert(history.end(), tokens.begin(), tokens.end());
  } else if (is_append && !Holds(layer, asked.pos, tokens)) {
    return absl::StrCat("append at ", asked.pos, " of length ", Length(layer), " was taken");
  }
  const int32_t window = geometry_->layer[layer].window;
  const int64_t first = window == 0 ? 0 : std::max<int64_t>(0, asked.pos - window + 1);
  for (int64_t pos = first; pos < asked.pos && pos < Length(layer); ++pos) {
    if (history[pos] == kSkipped) return absl::StrCat("a query saw skipped position ", pos);
  }
  return call.Check(item, history);
}

// The tokens of the layers of skip_to's group that stand below it count as there.
void SeqModel::Skip(int32_t layer, int64_t skip_to) {
  const LayerGroup& group = geometry_->groups[geometry_->layer[layer].group];
  for (const int32_t other : group.layers) {
    if (Length(other) < skip_to) history_[other].resize(skip_to, kSkipped);
  }
}

std::string SeqModel::JudgeAppend(const CallFacts& facts, const AppendCall& call) {
  const engine::AppendRequest& asked = call.request;
  const int64_t n = asked.n;
  if (asked.status.ok() && is_gone_) return "a sequence that is gone takes an append";
  if (asked.status.ok()) Lives(facts);
  if (asked.pieces_done == 0 && !asked.status.ok()) {  // the lengths may be from before its turn
    return JudgeFailure(facts, asked.status, asked.layer, asked.pos, n, /*is_append=*/true);
  }
  std::string complaint = asked.status.ok() ? "" : "no layer explains the failure";
  const std::vector<std::vector<uint64_t>> before = history_;
  for (int32_t i = 0; i < asked.layers_count; ++i) {
    const int32_t layer = asked.layer + i;
    if (absl::IsNotFound(asked.status)) {
      return JudgeFailure(facts, asked.status, layer, asked.pos, n, /*is_append=*/true);
    }
    const int64_t length = static_cast<int64_t>(before[layer].size());
    const int64_t reported = call.seq_lens[i];
    if (asked.skip_to > length && reported >= asked.skip_to) Skip(layer, asked.skip_to);
    if (reported > Length(layer)) {
      if (reported > asked.pos + n || Length(layer) != asked.pos) {
        return absl::StrCat("layer ", layer, " grew from ", length, " to ", reported);
      }
      history_[layer].insert(history_[layer].end(), call.tokens.begin(),
                             call.tokens.begin() + (reported - asked.pos));
    }
    if (reported < Length(layer) && asked.skip_to == 0) {
      return absl::StrCat("layer ", layer, " of length ", Length(layer), " reports ", reported);
    }
    if (asked.status.ok()) {
      if (!Holds(layer, asked.pos, call.tokens)) return "an append succeeded that is not there";
      continue;
    }
    // A piece stopped the chunk: some layer must be one where the status is possible from where it
    // stands now.
    const int64_t left_at = std::clamp(Length(layer), asked.pos, asked.pos + n);
    if (JudgeFailure(facts, asked.status, layer, asked.pos, n, true).empty() ||
        (left_at < asked.pos + n &&
         JudgeFailure(facts, asked.status, layer, left_at, asked.pos + n - left_at, true)
             .empty())) {
      complaint.clear();
    }
  }
  if (complaint.empty()) return "";
  return absl::StrCat(complaint, ": ", asked.status.ToString());
}

std::string SeqModel::JudgeTruncate(const CallFacts& facts, const absl::Status& status,
                                    int64_t seq_len) {
  if (!status.ok()) {
    if (absl::IsResourceExhausted(status) && has_shared_) return "";
    const bool has_window =
        std::any_of(geometry_->layer.begin(), geometry_->layer.end(),
                    [](const LayerGeometry& layer) { return layer.window > 0; });
    if (absl::IsFailedPrecondition(status) && has_window) return "";
    return JudgeFailure(facts, status, 0, 0, 0, /*is_append=*/false);
  }
  if (is_gone_) return "a sequence that is gone is truncated";
  for (std::vector<uint64_t>& history : history_) {
    if (static_cast<int64_t>(history.size()) > seq_len) history.resize(seq_len);
  }
  return "";
}

std::string SeqModel::JudgeFree(const CallFacts& facts, const absl::Status& status) {
  if (!status.ok()) return JudgeFailure(facts, status, 0, 0, 0, /*is_append=*/false);
  if (is_gone_) return "a sequence that is gone is freed";
  is_gone_ = true;
  return "";
}

std::string SeqModel::JudgeFork(const CallFacts& facts, const absl::Status& status) {
  if (absl::IsResourceExhausted(status)) return "";
  if (!status.ok()) return JudgeFailure(facts, status, 0, 0, 0, /*is_append=*/false);
  return is_gone_ ? "a sequence that is gone is forked" : "";
}

}  // namespace fp8kvd::testing
