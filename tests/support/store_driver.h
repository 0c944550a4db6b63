// tests/support/store_driver.h: drives a SeqStore and the model of it (store_model.h) through the
// same operations, chosen by random numbers or by a fuzzer's bytes, and compares after each: every
// status, length, page range and token, every owner of every page (audit.h), used + free == total.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cache/seq_store.h"
#include "tests/support/simulated_pages.h"
#include "tests/support/store_model.h"

namespace fp8kvd::cache {

class StoreDriver {
 public:
  // Gives a number in [0, bound), bound >= 1.
  using Choose = std::function<uint32_t(uint32_t bound)>;

  explicit StoreDriver(Choose choose);

  // One operation and all comparisons; says what differs, or nothing.
  std::string Step();
  // Operations that were answered by a status of each kind so far, "append OK" for one.
  const std::map<std::string, int64_t>& answers() const { return answers_; }

 private:
  // Small pools, so that they are full most of the time.
  static StoreOptions Options();
  uint32_t Below(uint32_t bound) { return choose_(bound); }
  int64_t ExpectedTokens();
  int64_t PagesLeft(int32_t model, int32_t group, TenantId tenant) const;
  ModelSeq* AnySeq();  // that is not freed, or null
  std::string Answer(const char* operation, absl::StatusCode got, absl::StatusCode want);

  std::string Create();
  std::string Fork();
  std::string Append();
  std::string Truncate();
  std::string Free();
  std::string HoldOrUnhold();
  std::string RenewOrSetTtl();
  std::string Expire();
  std::string FindStale();
  std::string Visible();
  // Another run of the daemon: a store made of what this one's image says.
  std::string Restart();

  AppendArgs AnyAppend(const ModelSeq& seq);
  std::string CheckRefusedForRoom(const ModelSeq& seq, const AppendArgs& args) const;
  std::string Compare() const;
  std::string CompareSeq(const ModelSeq& seq) const;
  std::string CompareGroup(const ModelSeq& seq, size_t group) const;
  void Forget(size_t at);

  Choose choose_;
  StoreOptions options_;
  SeqModel model_;
  SimulatedPages pages_;
  std::unique_ptr<SeqStore> store_;
  std::vector<ModelSeq> seqs_;
  std::vector<SeqHandle> stale_;
  int64_t now_ms_ = 0;
  uint64_t digest_ = 0;
  std::map<std::string, int64_t> answers_;
};

}  // namespace fp8kvd::cache
