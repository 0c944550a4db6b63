// tests/support/store_model.h: what cache/ promises of one sequence, written as directly as
// possible and without a page: a map from position to the token that an append brought there.
// Shares no code with cache/ but the structs of its arguments.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "absl/status/status.h"

#include "cache/append_plan.h"
#include "cache/ids.h"
#include "cache/store_options.h"

namespace fp8kvd::cache {

struct ModelSeq {
  struct Append {
    int64_t pos = 0;
    int32_t n = 0;
    uint64_t digest = 0;
  };
  struct Layer {
    int64_t len = 0;
    std::map<int64_t, uint64_t> tokens;  // position -> digest of the append that brought it
    std::deque<Append> kept;             // the latest ones, for retries
  };

  SeqHandle handle;
  SeqIndex index{0};
  int32_t model = 0;
  TenantId tenant{0};
  int64_t expected_tokens = 0;
  int64_t ttl_ms = 0;
  int64_t lease_end_ms = 0;
  int32_t holds = 0;
  bool freed = false;
  std::vector<Layer> layers;         // by model layer
  std::vector<int64_t> gone_before;  // by group: positions before it are reclaimed
};

class SeqModel {
 public:
  explicit SeqModel(const StoreOptions& options) : options_(options) {}

  ModelSeq NewSeq(int32_t model) const;
  // What an append is answered when there is room; *replay tells an OK that does nothing.
  absl::StatusCode OfAppend(const ModelSeq& seq, const AppendArgs& args, bool* replay) const;
  absl::StatusCode OfTruncate(const ModelSeq& seq, int64_t pos) const;
  absl::StatusCode OfVisible(const ModelSeq& seq, int32_t layer, int64_t pos, int32_t q_len) const;

  void Append(ModelSeq* seq, const AppendArgs& args) const;
  void Truncate(ModelSeq* seq, int64_t pos) const;

  size_t GroupOf(int32_t model, int32_t layer) const;
  const GroupOptions& Group(int32_t model, size_t group) const;
  int64_t LongestLayer(const ModelSeq& seq, size_t group) const;

 private:
  int64_t ShortestLayer(const ModelSeq& seq, size_t group) const;
  void Forget(ModelSeq* seq, size_t group, int64_t before) const;

  StoreOptions options_;
};

}  // namespace fp8kvd::cache
