// tests/sim/seq_model.h: what one sequence must hold, told from the answers that its client got,
// and which answers are possible. Answers are judged in the order of the calls.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "tests/support/engine_calls.h"

namespace fp8kvd::testing {

// What a call must be judged by, noted when it was submitted.
struct CallFacts {
  int64_t submitted_us = 0;
  bool was_cancelled = false;  // before its answer
  bool may_be_late = false;    // had a deadline
};

class SeqModel {
 public:
  static constexpr int64_t kSeqLenMax = 320;
  static constexpr uint64_t kSkipped = 0;  // a token that was never sent

  SeqModel(const cache::SeqHandle& handle, int32_t model, const ModelGeometry* geometry,
           int64_t expected_tokens, int64_t ttl_ms, int64_t now_us);
  // A fork of it, as it is now.
  SeqModel Child(const cache::SeqHandle& handle, int64_t expected_tokens, int64_t now_us);

  // Empty, or why the answer cannot be. Accepted answers change the model.
  std::string JudgeItem(const CallFacts& facts, const DecodeCall& call, int32_t item,
                        absl::Span<const uint64_t> tokens);
  std::string JudgeAppend(const CallFacts& facts, const AppendCall& call);
  std::string JudgeTruncate(const CallFacts& facts, const absl::Status& status, int64_t seq_len);
  std::string JudgeFree(const CallFacts& facts, const absl::Status& status);
  std::string JudgeFork(const CallFacts& facts, const absl::Status& status);

  // Every admitted call that names it. Untouched for its ttl, it may have ended, until an answer
  // shows that it lives.
  void Touch(int64_t now_us) {
    if (now_us + 1000 >= touched_us_ + ttl_ms_ * 1000) ended_before_us_ = now_us;
    touched_us_ = now_us;
  }

  // A call was lost with the device: nobody knows which of its items were done.
  void Lose() { is_lost_ = true; }
  bool is_lost() const { return is_lost_; }

  const cache::SeqHandle& handle() const { return handle_; }
  int32_t model() const { return model_; }
  bool is_gone() const { return is_gone_; }
  int64_t ttl_ms() const { return ttl_ms_; }
  int64_t Length(int32_t layer) const { return static_cast<int64_t>(history_[layer].size()); }
  const std::vector<uint64_t>& history(int32_t layer) const { return history_[layer]; }
  // What the client thinks the lengths will be once its calls in flight have succeeded.
  std::vector<int64_t> hoped;
  void ForgetHopes();
  int32_t calls_in_flight = 0;
  bool is_exclusive = false;  // a call in flight that wants no company

 private:
  // For any answer: "" if a status other than OK is possible, given what the call asked.
  std::string JudgeFailure(const CallFacts& facts, const absl::Status& status, int32_t layer,
                           int64_t pos, int64_t n, bool is_append);
  void Lives(const CallFacts& facts);
  bool Holds(int32_t layer, int64_t pos, absl::Span<const uint64_t> tokens) const;
  void Skip(int32_t layer, int64_t skip_to);

  cache::SeqHandle handle_;
  int32_t model_;
  const ModelGeometry* geometry_;
  int64_t expected_tokens_;
  int64_t ttl_ms_;
  int64_t touched_us_;
  bool is_gone_ = false;
  bool is_lost_ = false;
  int64_t ended_before_us_ = -1;                // may have; -1: it lives
  bool has_shared_ = false;                     // ever, through a fork
  std::vector<std::vector<uint64_t>> history_;  // [layers]
};

}  // namespace fp8kvd::testing
