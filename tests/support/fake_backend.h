// tests/support/fake_backend.h: a device on plain memory whose time the test decides.
//
// Content. A page keeps the k and v rows as they came. A query's "attention" is a 64-bit mark that
//   mixes its q row with every visible k and v row in order (FakeMark, which a test can compute for
//   itself from what it sent): a wrong page, a stale table entry, a lost append or a token too many
//   shows.
// Time. While held, calls only queue; Release does queued work in order, and fences pass behind it.
//   Rows that Bring was asked for arrive at once, or with HoldBrings when they are let.
// Looks for, and lists in complaints():
//   - a table entry or page outside its pool; a token read that is poison or was never written
//   - k, v or q in staging memory that changed between the call and the work (answered too early)
//   - rows that Bring has not brought, or not yet, in an append that says so
//   - two rows of one append launch that write the same token; one table entry edited twice in a
//     call; a page that is source and destination in one CopyPages
// Faults. FailCall(n): the n-th device call from now on is a device fault, and so is every later
//   one.
// Threads: those of a Backend.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/backend.h"

namespace fp8kvd::testing {

// The mark of a query: start with MarkOfQuery, then MarkToken for each visible token in order.
uint64_t MarkOfQuery(const uint16_t* q_row, int32_t head_dim, float sink_logit);
uint64_t MarkToken(uint64_t mark, const uint16_t* k_row, const uint16_t* v_row, int32_t head_dim);

class FakeBackend : public kernels::Backend {
 public:
  explicit FakeBackend(bool returns_at_once = false) : returns_at_once_(returns_at_once) {}

  // One device call, as it was made.
  struct Record {
    enum class Kind : uint8_t { kTables, kCopy, kAppend, kDecode, kPoison };
    Kind kind = Kind::kTables;
    int32_t count = 0;   // edits, copies, rows
    int32_t tokens = 0;  // of an append or the queries of a decode
    int32_t head_dim = 0;
    int32_t group = 0;
    Precision precision = Precision::kBf16;
    kernels::OutType out_type = kernels::OutType::kBf16;
    std::vector<int32_t> positions = {};  // of the rows
  };

  // Held or not. While not held, work is done within the call.
  void Hold() { is_held_ = true; }
  void Release();          // all that is queued, and holds no more
  void ReleaseOneFence();  // the work up to the oldest fence that has not passed
  // Work is done, but no fence is seen to pass before so many decodes from now on were launched.
  void PassNoFenceBefore(int32_t decodes) { decodes_to_pass_ = decodes; }
  // Appends of so many bytes of k and v, and more, are worth bringing first; 0: none is.
  void SetBringBytesMin(int64_t bytes) { bring_bytes_min_ = bytes; }
  void HoldBrings() { holds_brings_ = true; }
  void LetOneArrive();  // the oldest rows on their way, if there are any
  // From now on the oldest arrive as soon as somebody has asked for rows in vain.
  void LetArriveOnceAsked() { arrives_once_asked_ = true; }
  size_t on_their_way() const { return on_their_way_.size(); }
  bool has_queued() const { return !queued_.empty(); }

  void FailCall(int64_t calls) { fail_in_ = calls; }
  void SetRecording(bool is_recording) { is_recording_ = is_recording; }
  const std::vector<Record>& records() const { return records_; }
  std::vector<Record> RecordsOf(Record::Kind kind) const;
  void ForgetRecords() { records_.clear(); }
  const std::vector<std::string>& complaints() const { return complaints_; }

  kernels::DeviceInfo Device() const override;
  int64_t BlockBytes(Precision precision, int32_t head_dim) const override;
  absl::StatusOr<uint8_t*> AllocPool(int64_t bytes) override;
  absl::StatusOr<int32_t*> AllocTable(int64_t entries) override;
  absl::StatusOr<uint8_t*> AllocStaging(int64_t bytes) override;
  absl::Status WarmUp(absl::Span<const kernels::KernelShape> shapes, int32_t rows_max,
                      int32_t q_len_max, int32_t q_heads_max) override;
  absl::Status UpdateTables(absl::Span<const kernels::TableEdit> edits) override;
  absl::Status CopyPages(absl::Span<const kernels::PageCopy> copies) override;
  absl::StatusOr<std::optional<kernels::BringId>> Bring(
      const kernels::AppendParams& params) override;
  absl::StatusOr<bool> Brought(kernels::BringId bring) override;
  absl::Status Append(const kernels::AppendParams& params) override;
  absl::Status Decode(const kernels::DecodeParams& params) override;
  absl::Status Poison(uint8_t* pool_bytes, int64_t bytes) override;
  absl::Status Read(const uint8_t* pool_bytes, absl::Span<uint8_t> host) override;
  absl::Status Write(uint8_t* pool_bytes, absl::Span<const uint8_t> host) override;
  absl::StatusOr<kernels::FenceId> Fence() override;
  absl::StatusOr<bool> Passed(kernels::FenceId fence) override;
  int64_t allocations() const override { return allocations_; }

 private:
  const bool returns_at_once_;  // as DeviceInfo says it
  struct Pool {
    std::unique_ptr<uint8_t[]> bytes;
    int64_t size = 0;
  };
  struct Work {
    std::function<void()> run;  // null: a fence
    uint64_t fence = 0;
  };

  absl::Status Call();
  template <typename Run>
  void Do(Run run);
  template <typename Row>
  void Keep(Record::Kind kind, absl::Span<const Row> rows, Record record);
  void RunOldest();
  void CheckBrought(const kernels::AppendParams& params);
  void DoAppend(const kernels::AppendRow& row, int32_t head_dim);
  void DoDecode(const kernels::DecodeRow& row, const kernels::DecodeParams& params);
  void CheckAppends(const kernels::AppendParams& params);
  // The k row of a token and, 64 * head_dim values on, its v row; null with a complaint if outside.
  uint16_t* Token(const uint8_t* base, int64_t page_stride, const int32_t* block_table,
                  int32_t kv_head, int32_t pos, int32_t head_dim);
  void Complain(const std::string& what);

  std::vector<Pool> pools_;
  std::vector<std::unique_ptr<int32_t[]>> tables_;
  std::vector<std::unique_ptr<uint8_t[]>> stagings_;
  int64_t allocations_ = 0;
  bool is_held_ = false;
  int32_t decodes_to_pass_ = 0;
  bool is_recording_ = true;
  std::deque<Work> queued_;
  // Rows of an append, as they were when they set out.
  struct BroughtRow {
    const uint16_t* k = nullptr;
    const uint16_t* v = nullptr;
    int64_t values = 0;  // of each
    uint64_t mark = 0;

    uint64_t MarkNow() const;
  };
  int64_t bring_bytes_min_ = 0;
  bool holds_brings_ = false;
  bool arrives_once_asked_ = false;
  uint64_t brings_begun_ = 0;
  std::deque<std::vector<BroughtRow>> on_their_way_;
  std::vector<BroughtRow> brought_;  // and not appended
  uint64_t fences_taken_ = 0;
  uint64_t fences_passed_ = 0;
  int64_t fail_in_ = -1;  // calls until the fault; -1: none
  bool has_failed_ = false;
  std::vector<Record> records_;
  std::vector<std::string> complaints_;
};

}  // namespace fp8kvd::testing
