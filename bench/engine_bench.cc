// bench/engine_bench.cc: what the engine costs beside the kernels: turns on a device that does
// nothing.
//   DecodeTurn/items     Submit and one Step on one thread: admission, batch, plan, rows, answer
//   AttendTurn/items     the same without k and v
//   RoundTrip            one item to the engine's own thread and back, the caller asleep meanwhile
//   AppendTurn/tokens    one slice of a bulk append
// 64/8 heads, d128. The floor is 0: all of it is overhead. Run: build/release/bin/engine_bench
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "benchmark/benchmark.h"

#include "bench/null_backend.h"
#include "config/base/check.h"
#include "server/engine/engine.h"

namespace fp8kvd::bench {
namespace {

constexpr int32_t kLayers = 4;
constexpr int64_t kSeqLen = 32768;

class Flag final : public engine::Completion {
 public:
  void Done() override {
    is_done_.store(true, std::memory_order_release);
    is_done_.notify_one();
  }
  void Wait() { is_done_.wait(false, std::memory_order_acquire); }
  bool Take() { return is_done_.exchange(false, std::memory_order_acquire); }

 private:
  std::atomic<bool> is_done_{false};
};

engine::ModelSetup Model(int64_t pages) {
  engine::ModelSetup model;
  ModelGeometry& geometry = model.geometry;
  geometry.name = "bench";
  geometry.layers = kLayers;
  geometry.q_heads = 64;
  geometry.kv_heads = 8;
  geometry.head_dim = 128;
  geometry.sm_scale = 1.0F;
  geometry.groups.emplace_back();
  LayerGroup& group = geometry.groups.back();
  group.kv_heads = geometry.kv_heads;
  group.head_dim = geometry.head_dim;
  group.precision = Precision::kFp8Kv;
  for (int32_t i = 0; i < kLayers; ++i) {
    LayerGeometry layer;
    layer.group_layer = i;
    geometry.layer.push_back(layer);
    group.layers.push_back(i);
  }
  model.group_pages = {pages};
  return model;
}

class Setup {
 public:
  explicit Setup(int32_t seqs) {
    config::EngineOptions options;
    config::CacheOptions cache;
    cache.seqs_max = seqs;
    cache.seq_len_max = static_cast<int32_t>(kSeqLen);
    cache.lease_ttl_ms = 3'600'000;
    auto started = engine::Engine::Start(options, cache, {Model(seqs * (kSeqLen / kPageTokens))},
                                         /*incarnation=*/1, &backend_, &clock_);
    FP8KVD_CHECK(started.ok());
    engine = *std::move(started);
    engine::ControlRequest create(engine::ControlRequest::Op::kCreate);
    create.model = 0;
    create.count = seqs;
    create.done = &flag;
    FP8KVD_CHECK(engine->Submit(&create).ok());
    while (!flag.Take()) engine->Step();
    handles = create.handles;
  }

  // Back to empty sequences, when they are full.
  void Truncate() {
    engine::ControlRequest truncate(engine::ControlRequest::Op::kTruncate);
    truncate.handles = handles;
    truncate.seq_lens.assign(handles.size(), 0);
    truncate.done = &flag;
    FP8KVD_CHECK(engine->Submit(&truncate).ok());
    while (!flag.Take()) engine->Step();
  }

  std::unique_ptr<engine::Engine> engine;
  std::vector<cache::SeqHandle> handles;
  Flag flag;

 private:
  NullBackend backend_;
  engine::SteadyClock clock_;
};

// A decode of one item for each sequence; Next moves it on by a token.
class Step {
 public:
  explicit Step(Setup* setup, bool is_append) : setup_(setup), items_(setup->handles.size()) {
    for (size_t i = 0; i < items_.size(); ++i) {
      items_[i].handle = setup->handles[i];
      items_[i].row = static_cast<int32_t>(i);
    }
    const auto slot = setup->engine->staging().Acquire(static_cast<int64_t>(items_.size()) *
                                                       (64 * 4 + 8 * 4) * 128);
    FP8KVD_CHECK(slot.ok());
    slot_ = *slot;
    request.items = absl::MakeSpan(items_);
    request.q = reinterpret_cast<const uint16_t*>(slot_.bytes);
    if (is_append) request.k = request.v = request.q;
    request.out = slot_.bytes;
    request.done = &setup->flag;
  }
  ~Step() { setup_->engine->staging().Release(slot_); }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  void Next() {
    for (engine::DecodeItem& item : items_) ++item.pos;
    if (items_[0].pos == kSeqLen) {
      setup_->Truncate();
      for (engine::DecodeItem& item : items_) item.pos = 0;
    }
  }
  bool ok() const { return request.status.ok() && items_.back().status.ok(); }

  engine::DecodeRequest request;

 private:
  Setup* const setup_;
  std::vector<engine::DecodeItem> items_;
  engine::StagingSlot slot_;
};

void DecodeTurn(benchmark::State& state) {
  Setup setup(static_cast<int32_t>(state.range(0)));
  Step step(&setup, /*is_append=*/true);
  while (state.KeepRunning()) {
    FP8KVD_CHECK(setup.engine->Submit(&step.request).ok());
    setup.engine->Step();
    FP8KVD_CHECK(setup.flag.Take() && step.ok());
    step.Next();
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(DecodeTurn)->Arg(1)->Arg(8)->Arg(128);

void AttendTurn(benchmark::State& state) {
  Setup setup(static_cast<int32_t>(state.range(0)));
  {
    Step first(&setup, /*is_append=*/true);
    FP8KVD_CHECK(setup.engine->Submit(&first.request).ok());
    setup.engine->Step();
    FP8KVD_CHECK(setup.flag.Take() && first.ok());
  }
  Step step(&setup, /*is_append=*/false);
  while (state.KeepRunning()) {
    FP8KVD_CHECK(setup.engine->Submit(&step.request).ok());
    setup.engine->Step();
    FP8KVD_CHECK(setup.flag.Take() && step.ok());
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(AttendTurn)->Arg(1)->Arg(8)->Arg(128);

void RoundTrip(benchmark::State& state) {
  Setup setup(1);
  Step step(&setup, /*is_append=*/true);
  std::thread runner([&setup] { FP8KVD_CHECK(setup.engine->Run().ok()); });
  while (state.KeepRunning()) {
    FP8KVD_CHECK(setup.engine->Submit(&step.request).ok());
    setup.flag.Wait();
    FP8KVD_CHECK(setup.flag.Take() && step.ok());
    state.PauseTiming();
    if (step.request.items[0].pos == kSeqLen - 1) state.SkipWithError("the sequence is full");
    step.Next();
    state.ResumeTiming();
  }
  setup.engine->Drain();
  runner.join();
}
BENCHMARK(RoundTrip)->UseRealTime()->Iterations(kSeqLen - 2);

void AppendTurn(benchmark::State& state) {
  Setup setup(1);
  const int32_t n = static_cast<int32_t>(state.range(0));
  const auto slot = setup.engine->staging().Acquire(int64_t{n} * 8 * 128 * 2);
  FP8KVD_CHECK(slot.ok());
  const uint64_t digest = 1;
  int64_t seq_len = 0;
  engine::AppendRequest append;
  append.handle = setup.handles[0];
  append.n = append.slice_tokens = n;
  append.k = append.v = reinterpret_cast<const uint16_t*>(slot->bytes);
  append.slice_digests = absl::MakeConstSpan(&digest, 1);
  append.seq_lens = absl::MakeSpan(&seq_len, 1);
  append.done = &setup.flag;
  while (state.KeepRunning()) {
    FP8KVD_CHECK(setup.engine->Submit(&append).ok());
    while (!setup.flag.Take()) setup.engine->Step();
    FP8KVD_CHECK(append.status.ok());
    append.pos += n;
    if (append.pos + n <= kSeqLen) continue;
    setup.Truncate();
    append.pos = 0;
  }
  setup.engine->staging().Release(*slot);
  state.SetBytesProcessed(state.iterations() * int64_t{n} * 8 * 128 * 4);
}
BENCHMARK(AppendTurn)->Arg(16)->Arg(256);

}  // namespace
}  // namespace fp8kvd::bench

BENCHMARK_MAIN();
