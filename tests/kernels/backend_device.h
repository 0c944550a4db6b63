// tests/kernels/backend_device.h: a Backend as the device that cases run on. Takes its memory once
// and deals it out anew for every case.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "config/base/check.h"
#include "kernels/backend.h"
#include "tests/kernels/run_case.h"

namespace fp8kvd::kernels::cases {

class BackendDevice : public Device {
 public:
  struct Sizes {
    int64_t pool_bytes = int64_t{5} << 30;  // address space alone, until a page is written
    int64_t table_entries = 1 << 20;
    int64_t staging_bytes = int64_t{512} << 20;
  };

  // backend outlives this, and has been warmed up for the shapes of the cases.
  BackendDevice(Backend& backend, Sizes sizes) : backend_(backend), sizes_(sizes) {
    auto pool = backend.AllocPool(sizes.pool_bytes);
    auto table = backend.AllocTable(sizes.table_entries);
    auto staging = backend.AllocStaging(sizes.staging_bytes);
    FP8KVD_CHECK(pool.ok() && table.ok() && staging.ok());
    pool_ = *pool;
    table_ = *table;
    staging_ = *staging;
  }

  int64_t BlockBytes(Precision precision, int32_t head_dim) override {
    return backend_.BlockBytes(precision, head_dim);
  }
  void Reset() override { pool_used_ = table_used_ = staging_used_ = 0; }
  uint8_t* Pool(int64_t bytes) override {
    return Take(pool_, &pool_used_, bytes, sizes_.pool_bytes);
  }
  int32_t* Table(int64_t entries) override {
    return Take(table_, &table_used_, entries, sizes_.table_entries);
  }
  uint8_t* Staging(int64_t bytes) override {
    return Take(staging_, &staging_used_, bytes, sizes_.staging_bytes);
  }

  std::string Poison(uint8_t* pool_bytes, int64_t bytes) override {
    return Text(backend_.Poison(pool_bytes, bytes));
  }
  std::string SetTable(int32_t* at, const std::vector<int32_t>& pages) override {
    std::vector<TableEdit> edits;
    for (size_t i = 0; i < pages.size(); ++i) edits.push_back({at + i, pages[i]});
    return Text(backend_.UpdateTables(edits));
  }
  std::string Append(const AppendParams& params) override { return Text(backend_.Append(params)); }
  std::string Decode(const DecodeParams& params) override { return Text(backend_.Decode(params)); }
  std::string Wait() override {
    const auto fence = backend_.Fence();
    if (!fence.ok()) return Text(fence.status());
    for (;;) {
      const auto passed = backend_.Passed(*fence);
      if (!passed.ok()) return Text(passed.status());
      if (*passed) return "";
    }
  }

 private:
  static std::string Text(const absl::Status& status) {
    return status.ok() ? "" : status.ToString();
  }
  template <class T>
  static T* Take(T* memory, int64_t* used, int64_t count, int64_t size) {
    FP8KVD_CHECK(count <= size - *used);
    return memory + std::exchange(*used, *used + count);
  }

  Backend& backend_;
  const Sizes sizes_;
  uint8_t* pool_;
  int32_t* table_;
  uint8_t* staging_;
  int64_t pool_used_ = 0;
  int64_t table_used_ = 0;
  int64_t staging_used_ = 0;
};

}  // namespace fp8kvd::kernels::cases
