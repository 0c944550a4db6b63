#include "tests/kernels/cuda/gpu_checks.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "config/base/limits.h"
#include "kernels/bf16.h"
#include "kernels/cuda/page_layout.h"
#include "kernels/reference/append.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/cuda/append_checks.h"
#include "tests/kernels/cuda/invariant_checks.h"
#include "tests/kernels/run_case.h"

namespace fp8kvd::kernels::cuda {
namespace {

using cases::Answer;
using cases::BackendDevice;
using cases::Case;
using cases::Random;
using cases::Row;
using cases::Unseen;

constexpr Precision kPrecisions[] = {Precision::kFp8Kv, Precision::kBf16};

uint32_t Bits(float x) { return std::bit_cast<uint32_t>(x); }

bool SameBits(const float* a, const float* b, int64_t count) {
  return std::equal(a, a + count, b, [](float x, float y) { return Bits(x) == Bits(y); });
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && SameBits(a.data(), b.data(), static_cast<int64_t>(a.size()));
}

bool SameBits(const Answer& a, const Answer& b) {
  return SameBits(a.out, b.out) && SameBits(a.lse, b.lse);
}

Row AtEnd(int32_t seq_len, int32_t q_len, int32_t kv_heads) {
  Row row;
  row.seq_len = seq_len;
  row.pos = seq_len - q_len;
  row.q_len = q_len;
  row.kv_heads = kv_heads;
  return row;
}

Case Ragged(Precision precision, int32_t head_dim, int32_t group, int32_t rows, int32_t len_max) {
  Case c;
  c.name = "ragged";
  c.precision = precision;
  c.head_dim = head_dim;
  c.group = group;
  c.out_type = OutType::kFp32;
  c.seed = 77;
  Random random(rows * 1000 + head_dim + group);
  for (int32_t i = 0; i < rows; ++i) {
    c.rows.push_back(AtEnd(4 + static_cast<int32_t>(random.Below(len_max)), 1 + i % 3 % 2, 2));
  }
  return c;
}

std::string LaunchCase(BackendDevice& device, const Case& c, Answer* answer) {
  return cases::Launch(device, c, cases::MakeData(c), Unseen::kPoison, answer);
}

// ---- Bits ----

std::string TheSameLaunchTwice(Backend& /*backend*/, BackendDevice& device) {
  for (const Precision precision : kPrecisions) {
    const Case c = Ragged(precision, 128, 8, 48, 3000);
    Answer first;
    std::string error = LaunchCase(device, c, &first);
    for (int32_t i = 0; i < 3 && error.empty(); ++i) {
      Answer again;
      error = LaunchCase(device, c, &again);
      if (error.empty() && !SameBits(first, again)) error = "bits differ";
    }
    if (!error.empty()) return error;
  }
  return "";
}

// A row's part of an answer.
Answer PartOf(const Answer& all, const Case& c, int32_t row) {
  size_t first = 0;
  size_t count = 0;
  for (int32_t i = 0; i <= row; ++i) {
    first += count;
    count = static_cast<size_t>(c.rows[i].q_len) * c.rows[i].kv_heads * c.group;
  }
  Answer part;
  part.lse.assign(all.lse.begin() + first, all.lse.begin() + first + count);
  part.out.assign(all.out.begin() + first * c.head_dim,
                  all.out.begin() + (first + count) * c.head_dim);
  return part;
}

// Data of a row follow from its index in the case, so a row that is alone stands where it stood,
// the others reduced to one token.
std::string RowAloneOrInABatch(Backend& /*backend*/, BackendDevice& device) {
  for (const Precision precision : kPrecisions) {
    Case c = Ragged(precision, 128, 4, 24, 6000);
    c.batch_invariant = true;
    Answer batch;
    std::string error = LaunchCase(device, c, &batch);
    if (!error.empty()) return error;
    for (const int32_t row : {0, 5, 11, 23}) {
      Case alone = c;
      for (int32_t i = 0; i < static_cast<int32_t>(c.rows.size()); ++i) {
        if (i != row) alone.rows[i] = AtEnd(1, 1, 1);
      }
      Answer answer;
      error = LaunchCase(device, alone, &answer);
      if (!error.empty()) return error;
      if (!SameBits(PartOf(answer, alone, row), PartOf(batch, c, row))) {
        return "row " + std::to_string(row) + " of " + std::to_string(c.rows[row].seq_len) +
               " tokens has other bits alone";
      }
    }
  }
  return "";
}

// The host refuses such queries; should one come through, no other row may change.
std::string NanQueriesDisturbNobody(Backend& backend, BackendDevice& device) {
  constexpr int32_t kRows = 20;
  constexpr int32_t kTokens = 500;
  constexpr int32_t kHeadDim = 128;
  constexpr int32_t kGroup = 8;
  for (const Precision precision : kPrecisions) {
    device.Reset();
    const int64_t block = backend.BlockBytes(precision, kHeadDim);
    uint8_t* pool = device.Pool(8 * block);
    int32_t* table = device.Table(8);
    std::string error = device.SetTable(table, {7, 6, 5, 4, 3, 2, 1, 0});
    Random random(5);
    auto* kv = reinterpret_cast<uint16_t*>(device.Staging(kTokens * kHeadDim * 2));
    for (int32_t i = 0; i < kTokens * kHeadDim; ++i) kv[i] = FloatToBf16(random.Normal());
    const AppendRow append = {kv, kv, table, pool, block, 0, kTokens, 1};
    if (error.empty()) error = device.Append({&append, 1, kHeadDim, precision});
    if (error.empty()) error = device.Wait();  // both decodes go the same way

    constexpr int64_t kElements = kGroup * kHeadDim;
    auto* q = reinterpret_cast<uint16_t*>(device.Staging(kRows * kElements * 2));
    auto* out = reinterpret_cast<float*>(device.Staging(kRows * kElements * 4));
    for (int64_t i = 0; i < kRows * kElements; ++i) q[i] = FloatToBf16(random.Normal());
    std::vector<DecodeRow> rows;
    for (int32_t i = 0; i < kRows; ++i) {
      DecodeRow row{};
      row.q = q + i * kElements;
      row.out = out + i * kElements;
      row.block_table = table;
      row.base = pool;
      row.page_stride = block;
      row.pos = kTokens - 1 - 7 * i;
      row.q_len = 1;
      row.kv_heads = 1;
      row.sm_scale = 0.1F;
      rows.push_back(row);
    }
    const DecodeParams params = {rows.data(), kRows,          kHeadDim, kGroup,
                                 precision,   OutType::kFp32, false};
    if (error.empty()) error = device.Decode(params);
    if (error.empty()) error = device.Wait();
    if (!error.empty()) return error;
    const std::vector<float> clean(out, out + kRows * kElements);
    for (int64_t i = 0; i < kElements; ++i) q[3 * kElements + i] = 0x7FC0;  // NaN
    for (int64_t i = 0; i < kElements; ++i) q[9 * kElements + i] = 0x7F80;  // infinite
    error = device.Decode(params);
    if (error.empty()) error = device.Wait();
    if (!error.empty()) return error;
    for (int32_t i = 0; i < kRows; ++i) {
      if (i == 3 || i == 9) continue;
      if (!SameBits(out + i * kElements, clean.data() + i * kElements, kElements)) {
        return "row " + std::to_string(i) + " changed";
      }
    }
  }
  return "";
}

// The host refuses such logits; one beyond what fp32 holds in units of log2 still takes all weight.
std::string ASinkAboveAllTakesAllWeight(Backend& /*backend*/, BackendDevice& device) {
  constexpr float kSink = 3e38F;
  for (const Precision precision : kPrecisions) {
    Case c = Ragged(precision, 64, 8, 6, 200);
    for (Row& row : c.rows) row.sinks = true;
    std::vector<cases::RowData> data = cases::MakeData(c);
    for (cases::RowData& row : data) std::ranges::fill(row.sink_logits, kSink);
    Answer answer;
    const std::string error = cases::Launch(device, c, data, Unseen::kPoison, &answer);
    if (!error.empty()) return error;
    if (std::ranges::any_of(answer.out, [](float x) { return x != 0.0F; })) return "out is not 0";
    if (std::ranges::any_of(answer.lse, [](float x) { return x != kSink; })) {
      return "lse is not the sink";
    }
  }
  return "";
}

// Steps as a daemon takes them: append one token to each sequence, then decode it. Decode begins to
// read while the append may still run, so it must leave alone what that writes. Each answer is
// taken again when all is quiet.
std::string StepsSee(Backend& backend, BackendDevice& device, int32_t seqs, int32_t steps) {
  constexpr int32_t kHeadDim = 128;
  constexpr int32_t kGroup = 8;
  const int32_t seq_pages = (steps + kPageTokens - 1) / kPageTokens;
  for (const Precision precision : kPrecisions) {
    device.Reset();
    const int64_t block = backend.BlockBytes(precision, kHeadDim);
    uint8_t* pool = device.Pool(seqs * seq_pages * block);
    int32_t* tables = device.Table(seqs * seq_pages);
    std::vector<int32_t> pages(seqs * seq_pages);
    for (int32_t i = 0; i < seqs * seq_pages; ++i) pages[i] = seqs * seq_pages - 1 - i;
    std::string error = device.Poison(pool, seqs * seq_pages * block);
    if (error.empty()) error = device.SetTable(tables, pages);
    constexpr int64_t kRow = kHeadDim;
    constexpr int64_t kQ = kGroup * kHeadDim;
    auto* kv = reinterpret_cast<uint16_t*>(device.Staging(int64_t{steps} * seqs * kRow * 2));
    auto* q = reinterpret_cast<uint16_t*>(device.Staging(int64_t{steps} * seqs * kQ * 2));
    auto* out = reinterpret_cast<float*>(device.Staging(int64_t{steps} * seqs * kQ * 4));
    Random random(11);
    for (int64_t i = 0; i < int64_t{steps} * seqs * kRow; ++i) kv[i] = FloatToBf16(random.Normal());
    for (int64_t i = 0; i < int64_t{steps} * seqs * kQ; ++i) q[i] = FloatToBf16(random.Normal());
    const auto step = [&](int32_t pos, bool append) {
      std::vector<AppendRow> appends;
      std::vector<DecodeRow> rows;
      for (int32_t seq = 0; seq < seqs; ++seq) {
        const int64_t at = int64_t{pos} * seqs + seq;
        const int32_t* table = tables + seq * seq_pages;
        appends.push_back({kv + at * kRow, kv + at * kRow, table, pool, block, pos, 1, 1});
        DecodeRow row{};
        row.q = q + at * kQ;
        row.out = out + at * kQ;
        row.block_table = table;
        row.base = pool;
        row.page_stride = block;
        row.pos = pos;
        row.q_len = row.kv_heads = 1;
        row.sm_scale = 0.1F;
        rows.push_back(row);
      }
      if (append) error = device.Append({appends.data(), seqs, kHeadDim, precision});
      if (!error.empty()) return;
      error =
          device.Decode({rows.data(), seqs, kHeadDim, kGroup, precision, OutType::kFp32, false});
      // synccheck loses track of more launches than these at once.
      if (error.empty() && pos % 16 == 15) error = device.Wait();
    };
    for (int32_t pos = 0; pos < steps && error.empty(); ++pos) step(pos, true);
    if (error.empty()) error = device.Wait();
    const std::vector<float> first(out, out + int64_t{steps} * seqs * kQ);
    for (int32_t pos = 0; pos < steps && error.empty(); ++pos) step(pos, false);
    if (error.empty()) error = device.Wait();
    if (!error.empty()) return error;
    for (int64_t i = 0; i < int64_t{steps} * seqs * kQ; ++i) {
      if (Bits(first[i]) != Bits(out[i])) {
        return "step " + std::to_string(i / (seqs * kQ)) + " did not see what it appended";
      }
    }
  }
  return "";
}

// As few as go with a launch that does it all, as many as go with such launches at most, and as
// many as the copy engines bring.
std::string AStepSeesItsOwnTokens(Backend& backend, BackendDevice& device) {
  std::string error = StepsSee(backend, device, /*seqs=*/5, /*steps=*/150);
  for (const int32_t seqs : {256, 270}) {
    if (error.empty()) error = StepsSee(backend, device, seqs, /*steps=*/20);
  }
  return error;
}

// Steps of few and of many rows, alone and in flight together: results are there with a fence.
std::string StepsEndInTheirOrder(Backend& backend, BackendDevice& device) {
  constexpr int32_t kRowCounts[] = {1, 20, 3, 1, 8, 40, 2};
  constexpr int32_t kRowsMax = 40;
  constexpr int32_t kTokens = 100;
  constexpr int32_t kHeadDim = 128;
  constexpr int32_t kGroup = 8;
  constexpr int64_t kQ = kGroup * kHeadDim;
  constexpr int64_t kOut = kRowsMax * kQ;  // of a step
  device.Reset();
  const int64_t block = backend.BlockBytes(Precision::kFp8Kv, kHeadDim);
  uint8_t* pool = device.Pool(2 * kRowsMax * block);
  int32_t* tables = device.Table(2 * kRowsMax);
  std::vector<int32_t> pages(2 * kRowsMax);
  std::iota(pages.begin(), pages.end(), 0);
  std::string error = device.SetTable(tables, pages);
  auto* kv = reinterpret_cast<uint16_t*>(device.Staging((kTokens + kRowsMax) * kHeadDim * 2));
  auto* q = reinterpret_cast<uint16_t*>(device.Staging(kOut * 2));
  auto* out = reinterpret_cast<float*>(device.Staging(std::size(kRowCounts) * kOut * 4));
  Random random(12);
  for (int64_t i = 0; i < (kTokens + kRowsMax) * kHeadDim; ++i)
    kv[i] = FloatToBf16(random.Normal());
  for (int64_t i = 0; i < kOut; ++i) q[i] = FloatToBf16(random.Normal());
  std::vector<DecodeRow> rows(kRowsMax);
  for (int32_t i = 0; i < kRowsMax && error.empty(); ++i) {
    const uint16_t* tokens = kv + int64_t{i} * kHeadDim;
    const AppendRow append = {tokens, tokens, tables + 2 * i, pool, block, 0, kTokens, 1};
    error = device.Append({&append, 1, kHeadDim, Precision::kFp8Kv});
    rows[i].q = q + i * kQ;
    rows[i].block_table = tables + 2 * i;
    rows[i].base = pool;
    rows[i].page_stride = block;
    rows[i].pos = kTokens - 1;
    rows[i].q_len = rows[i].kv_heads = 1;
    rows[i].sm_scale = 0.1F;
  }
  const auto queue = [&](size_t i) {
    for (int32_t r = 0; r < kRowsMax; ++r) rows[r].out = out + i * kOut + r * kQ;
    error = device.Decode(
        {rows.data(), kRowCounts[i], kHeadDim, kGroup, Precision::kFp8Kv, OutType::kFp32, false});
  };
  for (size_t i = 0; i < std::size(kRowCounts) && error.empty(); ++i) {
    queue(i);
    if (error.empty()) error = device.Wait();
  }
  if (!error.empty()) return error;
  const std::vector<float> right(out, out + std::size(kRowCounts) * kOut);
  constexpr int32_t kRounds = 40;
  for (int32_t round = 0; round < kRounds; ++round) {
    std::memset(out, 0xFF, std::size(kRowCounts) * kOut * 4);
    std::vector<FenceId> fences;
    const auto judge = [&](size_t i) {
      absl::StatusOr<bool> passed = false;
      while (passed.ok() && !*passed) passed = backend.Passed(fences[i]);
      if (!passed.ok()) error = passed.status().ToString();
      if (!SameBits(out + i * kOut, &right[i * kOut], kRowCounts[i] * kQ)) {
        error += "a step of " + std::to_string(kRowCounts[i]) + " rows had not ended";
      }
    };
    for (size_t i = 0; i < std::size(kRowCounts) && error.empty(); ++i) {
      queue(i);
      const absl::StatusOr<FenceId> fence = backend.Fence();
      if (!fence.ok()) return fence.status().ToString();
      fences.push_back(*fence);
      if (round % 2 == 0) judge(i);
    }
    for (size_t i = 0; i < fences.size() && round % 2 == 1; ++i) judge(i);
    if (!error.empty()) return error;
  }
  return "";
}

std::string BatchOf512(Backend& /*backend*/, BackendDevice& device) {
  for (const Precision precision : kPrecisions) {
    Case c = Ragged(precision, 64, 4, 512, 700);
    const std::string error = cases::RunCase(device, c);
    if (!error.empty()) return error;
  }
  return "";
}

// Long enough that warps keep together (any/decode/pace.cuh), which no case is: one sequence, seen
// up to a different token by each row. A launch of one row is short again, and not kept together.
constexpr int32_t kLongRows = 64;

std::string ALongLaunchOf(int32_t head_dim, Backend& backend, BackendDevice& device) {
  constexpr int32_t kTokens = 6000;
  constexpr int32_t kHeads = 8;  // and as many query heads for each
  constexpr int32_t kPages = (kTokens + kPageTokens - 1) / kPageTokens;
  device.Reset();
  const int64_t stride = kHeads * backend.BlockBytes(Precision::kFp8Kv, head_dim);
  uint8_t* pool = device.Pool(kPages * stride);
  int32_t* table = device.Table(kPages);
  std::vector<int32_t> pages(kPages);
  std::iota(pages.rbegin(), pages.rend(), 0);
  std::string error = device.Poison(pool, kPages * stride);
  if (error.empty()) error = device.SetTable(table, pages);
  const int64_t kv_count = int64_t{kTokens} * kHeads * head_dim;
  const int64_t q_count = int64_t{kHeads} * kHeads * head_dim;
  auto* kv = reinterpret_cast<uint16_t*>(device.Staging((kv_count + 8) * 2));
  auto* q = reinterpret_cast<uint16_t*>(device.Staging(kLongRows * q_count * 2));
  auto* out = reinterpret_cast<float*>(device.Staging(kLongRows * q_count * 4));
  Random random(head_dim);
  for (int64_t i = 0; i < kv_count + 8; ++i) kv[i] = FloatToBf16(random.Normal());
  for (int64_t i = 0; i < kLongRows * q_count; ++i) q[i] = FloatToBf16(random.Normal());
  const AppendRow append = {kv, kv + 8, table, pool, stride, 0, kTokens, kHeads};
  if (error.empty()) error = device.Append({&append, 1, head_dim, Precision::kFp8Kv});
  std::vector<DecodeRow> rows(kLongRows);
  for (int32_t i = 0; i < kLongRows; ++i) {
    rows[i].q = q + i * q_count;
    rows[i].out = out + i * q_count;
    rows[i].block_table = table;
    rows[i].base = pool;
    rows[i].page_stride = stride;
    rows[i].pos = kTokens - 1 - 23 * i;
    rows[i].q_len = 1;
    rows[i].kv_heads = kHeads;
    rows[i].sm_scale = 0.1F;
  }
  const auto decode = [&](int32_t first, int32_t count) {
    if (!error.empty()) return;
    error = device.Decode(
        {rows.data() + first, count, head_dim, kHeads, Precision::kFp8Kv, OutType::kFp32, false});
  };
  const auto answer = [&] {
    if (error.empty()) error = device.Wait();
    return std::vector<float>(out, out + kLongRows * q_count);
  };
  for (int32_t i = 0; i < kLongRows; ++i) decode(i, 1);
  const std::vector<float> alone = answer();
  decode(0, kLongRows);
  const std::vector<float> together = answer();
  for (int32_t i = 0; i < 5; ++i) decode(0, kLongRows);
  const std::vector<float> again = answer();
  if (!error.empty()) return error;
  if (!SameBits(together, again)) return "bits differ";
  double difference = 0.0;
  double all = 0.0;
  for (size_t i = 0; i < alone.size(); ++i) {
    difference += std::pow(static_cast<double>(alone[i]) - static_cast<double>(together[i]), 2.0);
    all += std::pow(static_cast<double>(alone[i]), 2.0);
  }
  // Each is within 2e-3 of the right answer.
  return std::sqrt(difference / all) <= 4e-3 ? "" : "rows have other answers alone";
}

std::string ALongLaunchGivesWhatItsRowsGive(Backend& backend, BackendDevice& device) {
  for (const int32_t head_dim : {64, 128, 256}) {
    const std::string error = ALongLaunchOf(head_dim, backend, device);
    if (!error.empty()) return "head_dim " + std::to_string(head_dim) + ": " + error;
  }
  return "";
}

// ---- The rest of the backend ----

std::string AShapeWithoutAKernelIsNamed(Backend& backend, BackendDevice& /*device*/) {
  const KernelShape shape = {72, 8, Precision::kFp8Kv};
  const absl::Status status = backend.WarmUp(absl::MakeConstSpan(&shape, 1), 1, 1, 8);
  if (status.code() != absl::StatusCode::kUnimplemented) return "not UNIMPLEMENTED";
  const std::string text(status.message());
  return text.find("72") != std::string::npos && text.find("128") != std::string::npos
             ? ""
             : "the message does not say what exists: " + text;
}

// More launches than the backend has room for in flight; none may take memory.
std::string ManyLaunchesTakeNoMemory(Backend& backend, BackendDevice& device) {
  Case c = Ragged(Precision::kFp8Kv, 128, 8, 2, 100);
  Answer first;
  std::string error = LaunchCase(device, c, &first);
  const int64_t before = backend.allocations();
  for (int32_t i = 0; i < 300 && error.empty(); ++i) {
    Answer again;
    error = LaunchCase(device, c, &again);
    if (error.empty() && !SameBits(first, again)) error = "bits differ";
  }
  if (!error.empty()) return error;
  return backend.allocations() == before ? "" : "memory was taken";
}

}  // namespace

const std::vector<Check>& GpuChecks() {
  static const std::vector<Check> checks = {
      {"append_equals_the_reference_bit_by_bit", AppendEqualsTheReference},
      {"brought_rows_are_appended", BroughtRowsAreAppended},
      {"every_code_of_every_scale", EveryCodeOfEveryScale, true},
      {"the_same_launch_twice_gives_the_same_bits", TheSameLaunchTwice},
      {"batch_invariant_row_alone_or_in_a_batch", RowAloneOrInABatch, true},
      {"batch_invariant_items_of_many_rows_or_of_few", ItemsOfManyRowsOrOfFew, true},
      {"nan_queries_disturb_nobody", NanQueriesDisturbNobody},
      {"a_sink_above_all_takes_all_weight", ASinkAboveAllTakesAllWeight},
      {"a_step_sees_its_own_tokens", AStepSeesItsOwnTokens, true},
      {"steps_end_in_their_order", StepsEndInTheirOrder, true},
      {"batch_of_512", BatchOf512, true},
      {"a_long_launch_gives_what_its_rows_give", ALongLaunchGivesWhatItsRowsGive, true},
      {"copied_pages_are_equal", CopiedPagesAreEqual},
      {"a_shape_without_a_kernel_is_named", AShapeWithoutAKernelIsNamed},
      {"many_launches_take_no_memory", ManyLaunchesTakeNoMemory, true},
  };
  return checks;
}

}  // namespace fp8kvd::kernels::cuda
