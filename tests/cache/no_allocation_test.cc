// What the decode path calls takes no memory once the sequence exists: operator new is counted.
#include <cstdint>
#include <cstdlib>
#include <new>

#include <gtest/gtest.h>

#include "cache/seq_store.h"

namespace {
int64_t allocations = 0;
}  // namespace

void* operator new(size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace fp8kvd::cache {
namespace {

StoreOptions TwoGroups() {
  StoreOptions options;
  options.models = {{.groups = {{.layers = {0, 1}, .window = 0, .pages_total = 64},
                                {.layers = {2}, .window = 96, .pages_total = 64}}}};
  options.seqs_max = 4;
  options.seq_len_max = 4096;
  return options;
}

TEST(DecodePath, TakesNoMemoryOnceASequenceExists) {
  const auto store = *SeqStore::Make(TwoGroups());
  SeqHandle handle;
  ASSERT_TRUE(store->Create({}, 0, absl::MakeSpan(&handle, 1)).ok());
  const int64_t before = allocations;
  for (int64_t pos = 0; pos < 2000; ++pos) {
    for (int32_t layer = 0; layer < 3; ++layer) {
      const SeqIndex seq = *store->Find(handle, TenantId{0});
      store->Hold(seq);
      store->Renew(seq, pos);
      store->Commit(*store->PlanAppend(seq, {.layer = layer, .pos = pos, .n = 1}));
      ASSERT_TRUE(store->CheckVisible(seq, layer, pos, 1).ok());
      ASSERT_NE(store->Table(seq, layer / 2).pages().back(), kNoPage);
      store->Unhold(seq);
    }
  }
  EXPECT_EQ(allocations, before);
  EXPECT_EQ(store->SeqLen(*store->Find(handle, TenantId{0}), 2), 2000);
}

TEST(DecodePath, AnIndexIsUsedAgainWithoutTakingMemory) {
  const auto store = *SeqStore::Make(TwoGroups());
  SeqHandle handle;
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(store->Create({}, 0, absl::MakeSpan(&handle, 1)).ok());
    store->Free(*store->Find(handle, TenantId{0}));
  }
  const int64_t before = allocations;
  ASSERT_TRUE(store->Create({.expected_tokens = 100}, 0, absl::MakeSpan(&handle, 1)).ok());
  EXPECT_EQ(allocations, before);
}

}  // namespace
}  // namespace fp8kvd::cache
