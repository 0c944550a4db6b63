#include "tests/support/store_model.h"

#include <algorithm>

namespace fp8kvd::cache {

using absl::StatusCode;

const GroupOptions& SeqModel::Group(int32_t model, size_t group) const {
  return options_.models[static_cast<size_t>(model)].groups[group];
}

size_t SeqModel::GroupOf(int32_t model, int32_t layer) const {
  for (size_t g = 0;; ++g) {
    const std::vector<int32_t>& layers = Group(model, g).layers;
    if (std::count(layers.begin(), layers.end(), layer) > 0) return g;
  }
}

ModelSeq SeqModel::NewSeq(int32_t model) const {
  ModelSeq seq;
  seq.model = model;
  for (const GroupOptions& group : options_.models[static_cast<size_t>(model)].groups) {
    seq.layers.resize(seq.layers.size() + group.layers.size());
    seq.gone_before.push_back(0);
  }
  return seq;
}

int64_t SeqModel::ShortestLayer(const ModelSeq& seq, size_t group) const {
  int64_t len = options_.seq_len_max;
  for (const int32_t layer : Group(seq.model, group).layers) {
    len = std::min(len, seq.layers[static_cast<size_t>(layer)].len);
  }
  return len;
}

int64_t SeqModel::LongestLayer(const ModelSeq& seq, size_t group) const {
  int64_t len = 0;
  for (const int32_t layer : Group(seq.model, group).layers) {
    len = std::max(len, seq.layers[static_cast<size_t>(layer)].len);
  }
  return len;
}

StatusCode SeqModel::OfAppend(const ModelSeq& seq, const AppendArgs& args, bool* replay) const {
  *replay = false;
  if (args.layer < 0 || static_cast<size_t>(args.layer) >= seq.layers.size()) {
    return StatusCode::kInvalidArgument;
  }
  if (args.n < 1 || args.pos < 0 || args.skip_to < 0 || args.skip_to > args.pos) {
    return StatusCode::kInvalidArgument;
  }
  const ModelSeq::Layer& layer = seq.layers[static_cast<size_t>(args.layer)];
  if (args.pos != std::max(layer.len, args.skip_to)) {
    if (args.pos + args.n > layer.len) return StatusCode::kOutOfRange;
    for (const ModelSeq::Append& kept : layer.kept) {
      if (kept.pos != args.pos || kept.n != args.n) continue;
      *replay = kept.digest == args.digest;
      return *replay ? StatusCode::kOk : StatusCode::kAlreadyExists;
    }
    return StatusCode::kFailedPrecondition;
  }
  const size_t group = GroupOf(seq.model, args.layer);
  const int64_t window = Group(seq.model, group).window;
  if (args.skip_to > 0 && window == 0) return StatusCode::kInvalidArgument;
  if (args.pos + args.n > options_.seq_len_max) return StatusCode::kInvalidArgument;
  const int64_t slowest = std::max(ShortestLayer(seq, group), args.skip_to);
  if (window > 0 && args.pos + args.n > slowest + window + options_.reclaim_slack_tokens) {
    return StatusCode::kFailedPrecondition;
  }
  return StatusCode::kOk;
}

StatusCode SeqModel::OfTruncate(const ModelSeq& seq, int64_t pos) const {
  if (pos < 0) return StatusCode::kInvalidArgument;
  for (const int64_t gone : seq.gone_before) {
    if (pos < gone) return StatusCode::kFailedPrecondition;
  }
  return StatusCode::kOk;
}

StatusCode SeqModel::OfVisible(const ModelSeq& seq, int32_t layer, int64_t pos,
                               int32_t q_len) const {
  if (pos < 0 || q_len < 1) return StatusCode::kInvalidArgument;
  if (pos + q_len > seq.layers[static_cast<size_t>(layer)].len) return StatusCode::kOutOfRange;
  const size_t group = GroupOf(seq.model, layer);
  const int64_t window = Group(seq.model, group).window;
  for (int64_t p = pos; window > 0 && p < pos + q_len; ++p) {
    if (std::max<int64_t>(0, p - window + 1) < seq.gone_before[group]) {
      return StatusCode::kFailedPrecondition;
    }
  }
  return StatusCode::kOk;
}

void SeqModel::Forget(ModelSeq* seq, size_t group, int64_t before) const {
  seq->gone_before[group] = before;
  for (const int32_t layer : Group(seq->model, group).layers) {
    auto& tokens = seq->layers[static_cast<size_t>(layer)].tokens;
    tokens.erase(tokens.begin(), tokens.lower_bound(before));
  }
}

void SeqModel::Append(ModelSeq* seq, const AppendArgs& args) const {
  const size_t group = GroupOf(seq->model, args.layer);
  if (args.skip_to > seq->gone_before[group]) {
    for (const int32_t layer : Group(seq->model, group).layers) {
      int64_t& len = seq->layers[static_cast<size_t>(layer)].len;
      len = std::max(len, args.skip_to);
    }
    Forget(seq, group, args.skip_to);
  }
  ModelSeq::Layer& layer = seq->layers[static_cast<size_t>(args.layer)];
  for (int64_t pos = args.pos; pos < args.pos + args.n; ++pos) layer.tokens[pos] = args.digest;
  layer.len = args.pos + args.n;
  layer.kept.push_back({.pos = args.pos, .n = args.n, .digest = args.digest});
  if (layer.kept.size() > static_cast<size_t>(options_.replay_digests_max)) {
    layer.kept.pop_front();
  }
  const int64_t window = Group(seq->model, group).window;
  if (window == 0) return;
  const int64_t slowest = ShortestLayer(*seq, group);
  for (int64_t last = options_.page_tokens - 1;
       last < slowest - window - options_.reclaim_slack_tokens; last += options_.page_tokens) {
    if (last >= seq->gone_before[group]) Forget(seq, group, last + 1);
  }
}

void SeqModel::Truncate(ModelSeq* seq, int64_t pos) const {
  for (ModelSeq::Layer& layer : seq->layers) {
    layer.len = std::min(layer.len, pos);
    layer.tokens.erase(layer.tokens.lower_bound(pos), layer.tokens.end());
    std::deque<ModelSeq::Append> below;
    for (const ModelSeq::Append& kept : layer.kept) {
      if (kept.pos + kept.n <= pos) below.push_back(kept);
    }
    layer.kept = below;
  }
}

}  // namespace fp8kvd::cache
