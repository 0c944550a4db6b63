#include "cache/store_options.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace fp8kvd::cache {
namespace {

absl::Status CheckRange(absl::string_view name, int64_t value, int64_t least, int64_t most) {
  if (least <= value && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " is ", value, "; it may be ", least, " to ", most));
}

// Every layer 0 .. layers - 1 once, in one group.
absl::Status CheckLayers(const ModelOptions& model, size_t model_index) {
  std::vector<int32_t> layers;
  for (const GroupOptions& group : model.groups) {
    if (group.layers.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("model ", model_index, " has a layer group without layers; leave it out"));
    }
    layers.insert(layers.end(), group.layers.begin(), group.layers.end());
  }
  std::sort(layers.begin(), layers.end());
  for (size_t i = 0; i < layers.size(); ++i) {
    if (layers[i] != static_cast<int32_t>(i)) {
      return absl::InvalidArgumentError(
          absl::StrCat("model ", model_index, ": layer ", i,
                       " is not in exactly one layer group; name every layer from 0 on once"));
    }
  }
  return CheckRange(absl::StrCat("layers of model ", model_index),
                    static_cast<int64_t>(layers.size()), 1, kLayersMax);
}

}  // namespace

absl::Status CheckOptions(const StoreOptions& options) {
  struct Bound {
    absl::string_view name;
    int64_t value, least, most;
  };
  const Bound bounds[] = {
      {"models", static_cast<int64_t>(options.models.size()), 1, kModelsMax},
      {"tenants", static_cast<int64_t>(options.tenants.size()), 1, kTenantsMax},
      {"seqs_max", options.seqs_max, 1, kSeqsMax},
      {"seq_len_max", options.seq_len_max, 1, kSeqLenMax},
      {"reclaim_slack_tokens", options.reclaim_slack_tokens, 0, kSeqLenMax},
      {"replay_digests_max", options.replay_digests_max, 1, 1024},
      {"page_tokens", options.page_tokens, 1, kPageTokens},
  };
  for (const Bound& bound : bounds) {
    absl::Status status = CheckRange(bound.name, bound.value, bound.least, bound.most);
    if (!status.ok()) return status;
  }
  for (size_t i = 0; i < options.models.size(); ++i) {
    absl::Status status = CheckLayers(options.models[i], i);
    if (!status.ok()) return status;
    for (const GroupOptions& group : options.models[i].groups) {
      status = CheckRange("window", group.window, 0, kSeqLenMax);
      if (status.ok()) status = CheckRange("pages_total", group.pages_total, 1, kPagesMax);
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace fp8kvd::cache
