// tests/support/engine_calls.h: what tests of the engine send and expect. Tokens are ids; their
// rows, digests and the marks of FakeBackend follow from the ids, so a test states histories, not
// bytes.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "server/engine/clock.h"
#include "server/engine/engine.h"

namespace fp8kvd::testing {

class ManualClock final : public engine::Clock {
 public:
  int64_t NowUs() const override { return now_us_.load(); }
  void AdvanceUs(int64_t us) { now_us_ += us; }

 private:
  std::atomic<int64_t> now_us_{1'000'000};
};

class CountedDone final : public engine::Completion {
 public:
  void Done() override { ++times_; }
  int32_t times() const { return times_.load(); }

 private:
  std::atomic<int32_t> times_{0};
};

// A model whose layer i has window windows[i] (0: none). head_dim is small: FakeBackend takes it.
struct ModelSpec {
  std::string name = "m";
  std::vector<int32_t> windows = {0, 0};
  int32_t kv_heads = 1;
  int32_t group = 2;
  int32_t head_dim = 4;
  Precision precision = Precision::kBf16;
  int64_t pages = 64;  // of each group
};
engine::ModelSetup MakeModel(const ModelSpec& spec);

// The row of a token in one layer and KV head, [head_dim] finite values.
enum class RowKind : uint8_t { kQ, kK, kV };
void FillRow(RowKind kind, uint64_t id, int32_t layer, int32_t head, absl::Span<uint16_t> row);
uint64_t DigestOf(absl::Span<const uint64_t> tokens, int32_t layer);
// What FakeBackend answers a query (its id, and its head) over the visible tokens.
uint64_t ExpectedMark(const ModelGeometry& geometry, int32_t layer, int32_t q_head, uint64_t query,
                      absl::Span<const uint64_t> visible);

// One item of a decode: tokens are appended at pos (empty: attend only), queries ask from pos on.
struct ItemSpec {
  cache::SeqHandle handle;
  int64_t pos = 0;
  std::vector<uint64_t> tokens;
  std::vector<uint64_t> queries;  // as many as tokens, if those are given
};

// Calls own their request and staging slot, and must outlive their answer.
class DecodeCall {
 public:
  // All items append, or none does. Aborts without a staging slot.
  DecodeCall(engine::Engine* engine, int32_t model, int32_t layer, std::vector<ItemSpec> items,
             kernels::OutType out_type = kernels::OutType::kBf16);
  ~DecodeCall();
  DecodeCall(const DecodeCall&) = delete;
  DecodeCall& operator=(const DecodeCall&) = delete;

  absl::Status Submit();  // arrives at the engine's clock of the request
  bool done() const { return done_.times() == 1; }
  int32_t times_done() const { return done_.times(); }
  uint64_t MarkOf(int32_t item, int32_t query, int32_t q_head) const;
  // Fills its part of the slot with garbage, as the next holder of it would.
  void Scribble() const;
  // Empty, or what is wrong with the item's rows, its visible tokens being history [.., pos + j].
  std::string Check(int32_t item, absl::Span<const uint64_t> history) const;

  engine::DecodeRequest request;
  std::vector<engine::DecodeItem> items;

 private:
  engine::Engine* const engine_;
  const ModelGeometry& geometry_;
  std::vector<ItemSpec> specs_;
  engine::StagingSlot slot_;
  int64_t slot_bytes_ = 0;  // in use
  CountedDone done_;
};

class AppendCall {
 public:
  // tokens at pos in `layers_count` layers from `layer` on; the same ids in each.
  AppendCall(engine::Engine* engine, int32_t model, int32_t layer, int32_t layers_count,
             const cache::SeqHandle& handle, int64_t pos, std::vector<uint64_t> tokens,
             int64_t skip_to = 0);
  ~AppendCall();
  AppendCall(const AppendCall&) = delete;
  AppendCall& operator=(const AppendCall&) = delete;

  absl::Status Submit();
  bool done() const { return done_.times() == 1; }
  int32_t times_done() const { return done_.times(); }
  void Scribble() const;

  engine::AppendRequest request;
  std::vector<uint64_t> tokens;
  std::vector<int64_t> seq_lens;

 private:
  engine::Engine* const engine_;
  std::vector<uint64_t> digests_;
  engine::StagingSlot slot_;
  int64_t slot_bytes_ = 0;  // in use
  CountedDone done_;
};

class ControlCall {
 public:
  ControlCall(engine::Engine* engine, engine::ControlRequest::Op op)
      : request(op), engine_(engine) {
    request.done = &done_;
  }
  absl::Status Submit() { return engine_->Submit(&request); }
  bool done() const { return done_.times() == 1; }
  int32_t times_done() const { return done_.times(); }

  engine::ControlRequest request;

 private:
  engine::Engine* const engine_;
  CountedDone done_;
};

}  // namespace fp8kvd::testing
