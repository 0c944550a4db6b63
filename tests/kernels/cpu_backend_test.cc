// The CPU backend as the engine meets it: memory, refusals, fences, and no allocation once ready.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include <gtest/gtest.h>

#include "config/base/limits.h"
#include "kernels/bf16.h"
#include "tests/kernels/cpu_ready.h"

namespace {

std::atomic<int64_t> g_news{0};

void* CountedNew(size_t bytes, size_t alignment) {
  g_news.fetch_add(1, std::memory_order_relaxed);
  const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* at = std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
  if (at == nullptr) throw std::bad_alloc();
  return at;
}

}  // namespace

void* operator new(size_t bytes) { return CountedNew(bytes, alignof(std::max_align_t)); }
void* operator new[](size_t bytes) { return CountedNew(bytes, alignof(std::max_align_t)); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return CountedNew(bytes, static_cast<size_t>(alignment));
}
void* operator new[](size_t bytes, std::align_val_t alignment) {
  return CountedNew(bytes, static_cast<size_t>(alignment));
}
void operator delete(void* at) noexcept { std::free(at); }
void operator delete[](void* at) noexcept { std::free(at); }
void operator delete(void* at, size_t) noexcept { std::free(at); }
void operator delete[](void* at, size_t) noexcept { std::free(at); }
void operator delete(void* at, std::align_val_t) noexcept { std::free(at); }
void operator delete[](void* at, std::align_val_t) noexcept { std::free(at); }
void operator delete(void* at, size_t, std::align_val_t) noexcept { std::free(at); }
void operator delete[](void* at, size_t, std::align_val_t) noexcept { std::free(at); }

namespace fp8kvd::kernels::cpu {
namespace {

constexpr int32_t kHeadDim = 128;
constexpr int32_t kKvHeads = 2;
constexpr int32_t kGroup = 4;

// One sequence of ones in a pool of its own, ready to be appended to and attended to.
class OneSequence {
 public:
  OneSequence(Backend& backend, Precision precision, int32_t tokens)
      : backend_(backend),
        precision_(precision),
        tokens_(tokens),
        rows_(int64_t{tokens} * kKvHeads * kHeadDim, FloatToBf16(1.0F)),
        q_(kKvHeads * kGroup * kHeadDim, FloatToBf16(0.5F)),
        out_(q_.size()) {
    const int32_t pages = (tokens + kPageTokens - 1) / kPageTokens;
    stride_ = backend.BlockBytes(precision, kHeadDim) * kKvHeads;
    pool_ = *backend.AllocPool(pages * stride_);
    table_ = *backend.AllocTable(pages);
    std::vector<TableEdit> edits;
    for (int32_t i = 0; i < pages; ++i) edits.push_back({table_ + i, i});
    FP8KVD_CHECK(backend.UpdateTables(edits).ok());
  }

  absl::Status Append() {
    const AppendRow row{rows_.data(), rows_.data(), table_, pool_, stride_, 0, tokens_, kKvHeads};
    return backend_.Append({&row, 1, kHeadDim, precision_});
  }
  absl::Status Decode() {
    DecodeRow row{};
    row.q = q_.data();
    row.out = out_.data();
    row.block_table = table_;
    row.base = pool_;
    row.page_stride = stride_;
    row.pos = tokens_ - 1;
    row.q_len = 1;
    row.kv_heads = kKvHeads;
    row.sm_scale = 0.1F;
    return backend_.Decode({&row, 1, kHeadDim, kGroup, precision_, OutType::kFp32, false});
  }

  uint8_t* pool() { return pool_; }
  int64_t page_bytes() const { return stride_; }
  const std::vector<float>& out() const { return out_; }

 private:
  Backend& backend_;
  const Precision precision_;
  const int32_t tokens_;
  const std::vector<uint16_t> rows_;
  const std::vector<uint16_t> q_;
  std::vector<float> out_;
  int64_t stride_ = 0;
  uint8_t* pool_ = nullptr;
  int32_t* table_ = nullptr;
};

TEST(CpuBackend, ALaunchAllocatesNothingOnceReady) {
  ReadyCpu cpu(2);
  for (const Precision precision : {Precision::kFp8Kv, Precision::kBf16}) {
    OneSequence seq(cpu.backend, precision, 3000);
    const int64_t allocations = cpu.backend.allocations();
    const int64_t news = g_news;
    bool all_ok = true;
    for (int i = 0; i < 3; ++i) {
      all_ok = all_ok && seq.Append().ok() && seq.Decode().ok();
      const PageCopy copy{seq.pool() + seq.page_bytes(), seq.pool(), seq.page_bytes()};
      all_ok = all_ok && cpu.backend.CopyPages({&copy, 1}).ok();
      const auto fence = cpu.backend.Fence();
      all_ok = all_ok && *cpu.backend.Passed(*fence);
    }
    EXPECT_EQ(g_news - news, 0);
    EXPECT_TRUE(all_ok);
    EXPECT_EQ(cpu.backend.allocations(), allocations);
    EXPECT_EQ(seq.out(), std::vector<float>(seq.out().size(), 1.0F));
  }
}

TEST(CpuBackend, TheCounterOfAllocationsCounts) {
  const int64_t news = g_news;
  delete new int(1);
  EXPECT_EQ(g_news - news, 1);
}

TEST(CpuBackend, PoolsAreZeroedAndReadAndWriteMoveTheirBytes) {
  ReadyCpu cpu(1);
  uint8_t* pool = *cpu.backend.AllocPool(4096);
  std::vector<uint8_t> bytes(4096, 1);
  ASSERT_TRUE(cpu.backend.Read(pool, absl::MakeSpan(bytes)).ok());
  EXPECT_EQ(bytes, std::vector<uint8_t>(4096, 0));
  ASSERT_TRUE(cpu.backend.Poison(pool, 64).ok());
  bytes.assign(16, 7);
  ASSERT_TRUE(cpu.backend.Write(pool + 32, bytes).ok());
  bytes.resize(65);
  ASSERT_TRUE(cpu.backend.Read(pool, absl::MakeSpan(bytes)).ok());
  for (int i = 0; i < 65; ++i) {
    EXPECT_EQ(bytes[i], i == 64 ? 0 : i >= 32 && i < 48 ? 7 : 0xFF) << i;
  }
}

TEST(CpuBackend, MoreMemoryThanTheMachineHasIsRefused) {
  ReadyCpu cpu(1);
  const auto pool = cpu.backend.AllocPool(int64_t{1} << 46);
  EXPECT_EQ(pool.status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(CpuBackend, AShapeWithoutAKernelIsUnimplementedAndNamesThoseThatExist) {
  engine::WorkerPool workers(1);
  CpuBackend backend(&workers);
  for (const KernelShape shape :
       {KernelShape{100, 4, Precision::kFp8Kv}, KernelShape{128, 17, Precision::kFp8Kv},
        KernelShape{128, 0, Precision::kBf16}}) {
    const absl::Status status = backend.WarmUp({&shape, 1}, 1, 1, 64);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
    EXPECT_NE(status.message().find("64 80 96 128 192 256"), absl::string_view::npos);
  }
}

TEST(CpuBackend, ALaunchBeyondItsWarmUpIsRefusedInsteadOfAllocating) {
  engine::WorkerPool workers(1);
  CpuBackend backend(&workers);
  const KernelShape shape{64, kGroup, Precision::kFp8Kv};
  ASSERT_TRUE(backend.WarmUp({&shape, 1}, 1, 1, 64).ok());
  OneSequence seq(backend, Precision::kFp8Kv, 10);  // head_dim 128
  EXPECT_EQ(seq.Decode().code(), absl::StatusCode::kInternal);
}

TEST(CpuBackend, TheDeviceNamesItsProcessorThreadsAndInstructionSet) {
  ReadyCpu cpu(2);
  const DeviceInfo info = cpu.backend.Device();
  EXPECT_EQ(info.kind, "cpu");
  EXPECT_NE(info.name.find("2 threads"), std::string::npos) << info.name;
  EXPECT_GT(info.bytes_total, info.bytes_free);
}

}  // namespace
}  // namespace fp8kvd::kernels::cpu
