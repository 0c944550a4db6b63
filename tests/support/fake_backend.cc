#include "tests/support/fake_backend.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"

namespace fp8kvd::testing {
namespace {

// Written rows never look like this: the tests' values are finite.
constexpr uint16_t kPoison = 0xFFFF;

uint64_t Mix(uint64_t mark, uint64_t value) {
  mark = (mark ^ value) * 0x9E3779B97F4A7C15u;
  return mark ^ mark >> 29;
}

uint64_t MixRow(uint64_t mark, const uint16_t* row, int32_t head_dim) {
  for (int32_t i = 0; i + 4 <= head_dim; i += 4) {
    uint64_t values = 0;
    std::memcpy(&values, row + i, sizeof(values));
    mark = Mix(mark, values);
  }
  return mark;
}

}  // namespace

uint64_t MarkOfQuery(const uint16_t* q_row, int32_t head_dim, float sink_logit) {
  uint32_t sink = 0;
  std::memcpy(&sink, &sink_logit, sizeof(sink));
  return MixRow(Mix(1, sink), q_row, head_dim);
}

uint64_t MarkToken(uint64_t mark, const uint16_t* k_row, const uint16_t* v_row, int32_t head_dim) {
  return MixRow(MixRow(mark, k_row, head_dim), v_row, head_dim);
}

void FakeBackend::Complain(const std::string& what) {
  if (complaints_.size() < 100) complaints_.push_back(what);
}

absl::Status FakeBackend::Call() {
  if (fail_in_ >= 0 && fail_in_-- == 0) has_failed_ = true;
  return has_failed_ ? absl::InternalError("the fake device was told to fail") : absl::OkStatus();
}

template <typename Run>
void FakeBackend::Do(Run run) {
  if (is_held_) {
    queued_.push_back(Work{.run = std::move(run)});
  } else {
    run();
  }
}

void FakeBackend::RunOldest() {
  Work work = std::move(queued_.front());
  queued_.pop_front();
  if (work.run) {
    work.run();
  } else {
    fences_passed_ = work.fence;
  }
}

void FakeBackend::Release() {
  while (!on_their_way_.empty()) LetOneArrive();
  holds_brings_ = false;
  while (!queued_.empty()) RunOldest();
  is_held_ = false;
}

void FakeBackend::ReleaseOneFence() {
  const uint64_t passed = fences_passed_;
  while (!queued_.empty() && fences_passed_ == passed) RunOldest();
}

template <typename Row>
void FakeBackend::Keep(Record::Kind kind, absl::Span<const Row> rows, Record record) {
  if (!is_recording_) return;
  record.kind = kind;
  record.count = static_cast<int32_t>(rows.size());
  if constexpr (requires(const Row& row) { row.pos; }) {
    for (const Row& row : rows) record.positions.push_back(row.pos);
  }
  records_.push_back(std::move(record));
}

std::vector<FakeBackend::Record> FakeBackend::RecordsOf(Record::Kind kind) const {
  std::vector<Record> found;
  for (const Record& record : records_) {
    if (record.kind == kind) found.push_back(record);
  }
  return found;
}

kernels::DeviceInfo FakeBackend::Device() const {
  return kernels::DeviceInfo{
      .kind = "fake", .name = "plain memory", .returns_at_once = returns_at_once_};
}

int64_t FakeBackend::BlockBytes(Precision /*precision*/, int32_t head_dim) const {
  return int64_t{2} * kPageTokens * head_dim * static_cast<int64_t>(sizeof(uint16_t));
}

absl::StatusOr<uint8_t*> FakeBackend::AllocPool(int64_t bytes) {
  ++allocations_;
  pools_.push_back(Pool{.bytes = std::make_unique<uint8_t[]>(bytes), .size = bytes});
  return pools_.back().bytes.get();
}

absl::StatusOr<int32_t*> FakeBackend::AllocTable(int64_t entries) {
  ++allocations_;
  tables_.push_back(std::make_unique<int32_t[]>(entries));
  std::fill_n(tables_.back().get(), entries, INT32_MAX);
  return tables_.back().get();
}

absl::StatusOr<uint8_t*> FakeBackend::AllocStaging(int64_t bytes) {
  ++allocations_;
  stagings_.push_back(std::make_unique_for_overwrite<uint8_t[]>(bytes));
  return stagings_.back().get();
}

absl::Status FakeBackend::WarmUp(absl::Span<const kernels::KernelShape> shapes,
                                 int32_t /*rows_max*/, int32_t /*q_len_max*/,
                                 int32_t /*q_heads_max*/) {
  for (const kernels::KernelShape& shape : shapes) {
    if (shape.head_dim % 4 != 0) {
      return absl::UnimplementedError("the fake device wants a head_dim that 4 divides");
    }
  }
  return absl::OkStatus();
}

absl::Status FakeBackend::UpdateTables(absl::Span<const kernels::TableEdit> edits) {
  if (absl::Status status = Call(); !status.ok()) return status;
  Keep(Record::Kind::kTables, edits, Record{});
  Do([this, kept = std::vector<kernels::TableEdit>(edits.begin(), edits.end())] {
    std::set<int32_t*> seen;
    for (const kernels::TableEdit& edit : kept) {
      if (!seen.insert(edit.at).second) Complain("a table entry is edited twice in one call");
      *edit.at = edit.page;
    }
  });
  return absl::OkStatus();
}

absl::Status FakeBackend::CopyPages(absl::Span<const kernels::PageCopy> copies) {
  if (absl::Status status = Call(); !status.ok()) return status;
  Keep(Record::Kind::kCopy, copies, Record{});
  Do([this, kept = std::vector<kernels::PageCopy>(copies.begin(), copies.end())] {
    std::set<const uint8_t*> sources;
    for (const kernels::PageCopy& copy : kept) sources.insert(copy.from);
    for (const kernels::PageCopy& copy : kept) {
      if (sources.contains(copy.to)) Complain("a page is source and destination of copies");
      std::memcpy(copy.to, copy.from, copy.bytes);
    }
  });
  return absl::OkStatus();
}

uint16_t* FakeBackend::Token(const uint8_t* base, int64_t page_stride, const int32_t* block_table,
                             int32_t kv_head, int32_t pos, int32_t head_dim) {
  const int32_t page = block_table[pos / kPageTokens];
  const int64_t block_bytes = BlockBytes(Precision::kBf16, head_dim);
  for (const Pool& pool : pools_) {
    const int64_t start = base - pool.bytes.get();
    if (base < pool.bytes.get() || start >= pool.size) continue;
    const int64_t offset = start + page * page_stride + kv_head * block_bytes;
    if (page < 0 || offset + block_bytes > pool.size) break;
    uint16_t* const block = reinterpret_cast<uint16_t*>(pool.bytes.get() + offset);
    return block + int64_t{pos % kPageTokens} * head_dim;
  }
  Complain(absl::StrCat("position ", pos, " has table entry ", page, ", outside its pool"));
  return nullptr;
}

void FakeBackend::CheckAppends(const kernels::AppendParams& params) {
  std::set<const uint16_t*> written;
  for (int32_t r = 0; r < params.rows_count; ++r) {
    const kernels::AppendRow& row = params.rows[r];
    for (int32_t t = 0; t < row.n; ++t) {
      const uint16_t* at =
          Token(row.base, row.page_stride, row.block_table, 0, row.pos + t, params.head_dim);
      if (at != nullptr && !written.insert(at).second) {
        Complain(absl::StrCat("position ", row.pos + t, " is written twice in one launch"));
      }
    }
  }
}

uint64_t FakeBackend::BroughtRow::MarkNow() const {
  const auto count = static_cast<int32_t>(values);
  return MixRow(MixRow(0, k, count), v, count);
}

absl::StatusOr<std::optional<kernels::BringId>> FakeBackend::Bring(
    const kernels::AppendParams& params) {
  if (absl::Status status = Call(); !status.ok()) return status;
  std::vector<BroughtRow> rows;
  int64_t bytes = 0;
  for (const kernels::AppendRow& row : absl::MakeConstSpan(params.rows, params.rows_count)) {
    rows.push_back(
        {.k = row.k, .v = row.v, .values = int64_t{row.n} * row.kv_heads * params.head_dim});
    rows.back().mark = rows.back().MarkNow();
    bytes += 2 * rows.back().values * static_cast<int64_t>(sizeof(uint16_t));
  }
  if (bring_bytes_min_ == 0 || bytes < bring_bytes_min_) return std::optional<kernels::BringId>();
  on_their_way_.push_back(std::move(rows));
  ++brings_begun_;
  if (!holds_brings_) LetOneArrive();
  return std::optional<kernels::BringId>(kernels::BringId{brings_begun_});
}

absl::StatusOr<bool> FakeBackend::Brought(kernels::BringId bring) {
  if (absl::Status status = Call(); !status.ok()) return status;
  const bool has_arrived = bring.value <= brings_begun_ - on_their_way_.size();
  if (!has_arrived && arrives_once_asked_) LetOneArrive();
  return has_arrived;
}

void FakeBackend::LetOneArrive() {
  if (on_their_way_.empty()) return;
  for (const BroughtRow& row : on_their_way_.front()) {
    if (row.MarkNow() != row.mark && !has_failed_)
      Complain("k or v changed on their way to the device");
    // What another one's rows in the same place have brought is of no use any more.
    std::erase_if(brought_, [&row](const BroughtRow& before) { return before.k == row.k; });
    brought_.push_back(row);
  }
  on_their_way_.pop_front();
}

void FakeBackend::CheckBrought(const kernels::AppendParams& params) {
  for (const kernels::AppendRow& row : absl::MakeConstSpan(params.rows, params.rows_count)) {
    const auto at = std::find_if(brought_.begin(), brought_.end(),
                                 [&row](const BroughtRow& brought) { return brought.k == row.k; });
    if (at == brought_.end() || at->v != row.v || at->MarkNow() != at->mark ||
        at->values != int64_t{row.n} * row.kv_heads * params.head_dim) {
      Complain(absl::StrCat("position ", row.pos, " was appended and not brought"));
    }
  }
}

absl::Status FakeBackend::Append(const kernels::AppendParams& params) {
  if (absl::Status status = Call(); !status.ok()) return status;
  if (params.is_brought) CheckBrought(params);
  const absl::Span<const kernels::AppendRow> rows(params.rows, params.rows_count);
  Record record{.head_dim = params.head_dim, .precision = params.precision};
  for (const kernels::AppendRow& row : rows) record.tokens += row.n;
  Keep(Record::Kind::kAppend, rows, record);
  const auto mark_of = [](absl::Span<const kernels::AppendRow> all, int32_t head_dim) {
    uint64_t mark = 0;
    for (const kernels::AppendRow& row : all) {
      mark = MixRow(mark, row.k, row.n * row.kv_heads * head_dim);
      mark = MixRow(mark, row.v, row.n * row.kv_heads * head_dim);
    }
    return mark;
  };
  if (!is_held_) {
    if (is_recording_) CheckAppends(params);
    for (const kernels::AppendRow& row : rows) DoAppend(row, params.head_dim);
    return absl::OkStatus();
  }
  Do([this, kept = std::vector<kernels::AppendRow>(rows.begin(), rows.end()), copy = params,
      mark = mark_of(rows, params.head_dim), mark_of]() mutable {
    copy.rows = kept.data();
    if (mark_of(kept, copy.head_dim) != mark && !has_failed_) {
      Complain("k or v changed before the append ran");
    }
    CheckAppends(copy);
    for (const kernels::AppendRow& row : kept) DoAppend(row, copy.head_dim);
  });
  return absl::OkStatus();
}

void FakeBackend::DoAppend(const kernels::AppendRow& row, int32_t head_dim) {
  for (int32_t t = 0; t < row.n; ++t) {
    for (int32_t kv_head = 0; kv_head < row.kv_heads; ++kv_head) {
      uint16_t* const k =
          Token(row.base, row.page_stride, row.block_table, kv_head, row.pos + t, head_dim);
      if (k == nullptr) return;
      const int64_t from = (int64_t{t} * row.kv_heads + kv_head) * head_dim;
      std::copy_n(row.k + from, head_dim, k);
      std::copy_n(row.v + from, head_dim, k + int64_t{kPageTokens} * head_dim);
    }
  }
}

absl::Status FakeBackend::Decode(const kernels::DecodeParams& params) {
  if (absl::Status status = Call(); !status.ok()) return status;
  decodes_to_pass_ = std::max(0, decodes_to_pass_ - 1);
  const absl::Span<const kernels::DecodeRow> rows(params.rows, params.rows_count);
  Record record{.head_dim = params.head_dim,
                .group = params.group,
                .precision = params.precision,
                .out_type = params.out_type};
  for (const kernels::DecodeRow& row : rows) record.tokens += row.q_len;
  Keep(Record::Kind::kDecode, rows, record);
  const auto mark_of = [](absl::Span<const kernels::DecodeRow> all,
                          const kernels::DecodeParams& shape) {
    uint64_t mark = 0;
    for (const kernels::DecodeRow& row : all) {
      mark = MixRow(mark, row.q, row.q_len * row.kv_heads * shape.group * shape.head_dim);
    }
    return mark;
  };
  if (!is_held_) {
    for (const kernels::DecodeRow& row : rows) DoDecode(row, params);
    return absl::OkStatus();
  }
  Do([this, kept = std::vector<kernels::DecodeRow>(rows.begin(), rows.end()), copy = params,
      mark = mark_of(rows, params), mark_of]() mutable {
    copy.rows = kept.data();
    if (mark_of(kept, copy) != mark && !has_failed_) Complain("q changed before the decode ran");
    for (const kernels::DecodeRow& row : kept) DoDecode(row, copy);
  });
  return absl::OkStatus();
}

void FakeBackend::DoDecode(const kernels::DecodeRow& row, const kernels::DecodeParams& params) {
  const int32_t head_dim = params.head_dim;
  const int32_t q_heads = row.kv_heads * params.group;
  const int64_t out_row_bytes =
      int64_t{head_dim} * (params.out_type == kernels::OutType::kFp32 ? 4 : 2);
  for (int32_t j = 0; j < row.q_len; ++j) {
    const int32_t last = row.pos + j;
    const int32_t first = row.window == 0 ? 0 : std::max(0, last - row.window + 1);
    for (int32_t q_head = 0; q_head < q_heads; ++q_head) {
      const int64_t at = int64_t{j} * q_heads + q_head;
      const float sink = row.sink_logits == nullptr ? 0.0F : row.sink_logits[q_head];
      uint64_t mark = MarkOfQuery(row.q + at * head_dim, head_dim, sink);
      for (int32_t pos = first; pos <= last; ++pos) {
        const uint16_t* const k =
            Token(row.base, row.page_stride, row.block_table, q_head / params.group, pos, head_dim);
        if (k == nullptr) return;
        if (k[0] == kPoison) Complain(absl::StrCat("position ", pos, " is poison when read"));
        mark = MarkToken(mark, k, k + int64_t{kPageTokens} * head_dim, head_dim);
      }
      std::memcpy(static_cast<uint8_t*>(row.out) + at * out_row_bytes, &mark, sizeof(mark));
      if (row.lse != nullptr) row.lse[at] = static_cast<float>(last - first + 1);
    }
  }
}

absl::Status FakeBackend::Poison(uint8_t* pool_bytes, int64_t bytes) {
  if (absl::Status status = Call(); !status.ok()) return status;
  Keep(Record::Kind::kPoison, absl::Span<const kernels::PageCopy>(), Record{});
  Do([pool_bytes, bytes] { std::memset(pool_bytes, 0xFF, bytes); });
  return absl::OkStatus();
}

absl::Status FakeBackend::Read(const uint8_t* pool_bytes, absl::Span<uint8_t> host) {
  if (absl::Status status = Call(); !status.ok()) return status;
  while (!queued_.empty()) RunOldest();
  std::memcpy(host.data(), pool_bytes, host.size());
  return absl::OkStatus();
}

absl::Status FakeBackend::Write(uint8_t* pool_bytes, absl::Span<const uint8_t> host) {
  if (absl::Status status = Call(); !status.ok()) return status;
  while (!queued_.empty()) RunOldest();
  std::memcpy(pool_bytes, host.data(), host.size());
  return absl::OkStatus();
}

absl::StatusOr<kernels::FenceId> FakeBackend::Fence() {
  if (absl::Status status = Call(); !status.ok()) return status;
  const uint64_t fence = ++fences_taken_;
  if (is_held_) {
    queued_.push_back(Work{.run = nullptr, .fence = fence});
  } else {
    fences_passed_ = fence;
  }
  return kernels::FenceId{fence};
}

absl::StatusOr<bool> FakeBackend::Passed(kernels::FenceId fence) {
  if (absl::Status status = Call(); !status.ok()) return status;
  return decodes_to_pass_ == 0 && fence.value <= fences_passed_;
}

}  // namespace fp8kvd::testing
