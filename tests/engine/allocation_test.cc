// Out of memory after warm-up, because the first large batch allocates: the decode path takes none.
#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include "gtest/gtest.h"

#include "bench/null_backend.h"
#include "tests/support/engine_calls.h"

namespace {
std::atomic<int64_t> g_allocations{0};
}  // namespace

void* operator new(size_t size) {
  ++g_allocations;
  if (void* const memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t /*size*/) noexcept { std::free(memory); }

namespace fp8kvd::testing {
namespace {

TEST(Allocation, TheDecodePathTakesNoMemory) {
  bench::NullBackend backend;
  ManualClock clock;
  config::EngineOptions options;
  config::CacheOptions cache;
  cache.seqs_max = 64;
  cache.seq_len_max = 4096;
  ModelSpec spec{.windows = {0, 128}, .pages = 4096};
  auto engine = *engine::Engine::Start(options, cache, {MakeModel(spec)}, 1, &backend, &clock);
  ControlCall create(engine.get(), engine::ControlRequest::Op::kCreate);
  create.request.model = 0;
  create.request.count = 64;
  ASSERT_TRUE(create.Submit().ok());
  engine->Step();
  std::vector<ItemSpec> items;
  for (const cache::SeqHandle& handle : create.request.handles) {
    items.push_back(ItemSpec{.handle = handle, .pos = 0, .tokens = {1}, .queries = {1}});
  }
  DecodeCall first_layer(engine.get(), 0, 0, items);
  DecodeCall second_layer(engine.get(), 0, 1, items);
  const int64_t of_device = engine->stats().device_allocations_total;
  EXPECT_GT(of_device, 0);
  const int64_t before = g_allocations;
  for (int32_t pos = 0; pos < 1000; ++pos) {  // the first and largest batch included
    for (DecodeCall* call : {&first_layer, &second_layer}) {
      for (engine::DecodeItem& item : call->items) item.pos = pos;
      if (!call->Submit().ok()) FAIL() << "refused";
    }
    while (engine->Step()) {
    }
    if (first_layer.times_done() != pos + 1 || !second_layer.items[63].status.ok()) {
      FAIL() << "step " << pos << ": " << second_layer.items[63].status;
    }
    clock.AdvanceUs(100);
  }
  EXPECT_EQ(g_allocations - before, 0);
  EXPECT_EQ(engine->stats().device_allocations_total, of_device);
  EXPECT_EQ(engine->stats().rows_total, 128'000u);
}

}  // namespace
}  // namespace fp8kvd::testing
