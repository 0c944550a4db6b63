#include "tests/kernels/run_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "config/base/limits.h"
#include "kernels/bf16.h"
#include "kernels/reference/append.h"

namespace fp8kvd::kernels::cases {
namespace {

constexpr int64_t kGuardBytes = 64;
constexpr uint8_t kPoisonByte = 0xFF;

int64_t RoundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

float SmScale(const Case& c, const Row& row) {
  return row.sm_scale != 0.0F ? row.sm_scale : 1.0F / std::sqrt(static_cast<float>(c.head_dim));
}

// Tokens [first, end) of a row that stand in the cache.
Visible InCache(const Row& row, Unseen unseen) {
  return unseen == Unseen::kPoison ? VisibleKeys(row) : Visible{0, row.seq_len};
}

// Where a row's answer lies: NaN with guards on both sides.
struct Output {
  uint8_t* bytes = nullptr;
  int64_t size = 0;

  void Make(Device& device, int64_t bytes_wanted) {
    size = bytes_wanted;
    uint8_t* all = device.Staging(RoundUp(size, kGuardBytes) + 2 * kGuardBytes);
    std::memset(all, kPoisonByte, RoundUp(size, kGuardBytes) + 2 * kGuardBytes);
    bytes = all + kGuardBytes;
  }
  bool GuardsHold() const {
    const auto poison = [](uint8_t byte) { return byte == kPoisonByte; };
    return std::all_of(bytes - kGuardBytes, bytes, poison) &&
           std::all_of(bytes + size, bytes + size + kGuardBytes, poison);
  }
};

// Everything one launch needs, laid out on the device.
class CaseOnDevice {
 public:
  CaseOnDevice(Device& device, const Case& c, const std::vector<RowData>& data, Unseen unseen)
      : device_(device), case_(c), data_(data), unseen_(unseen) {
    int32_t kv_heads_max = 1;
    for (const Row& row : c.rows) kv_heads_max = std::max(kv_heads_max, row.kv_heads);
    block_bytes_ = device.BlockBytes(c.precision, c.head_dim);
    page_stride_ = block_bytes_ * kv_heads_max * c.layers;
  }

  std::string Run(Answer* answer) {
    device_.Reset();
    std::string error = PlacePages();
    for (size_t i = 0; error.empty() && i < case_.rows.size(); ++i) {
      error = AddRow(static_cast<int32_t>(i));
    }
    for (const std::vector<AppendRow>* appends : {&appends_, &last_appends_}) {
      if (!error.empty() || appends->empty()) continue;
      error = device_.Append({appends->data(), static_cast<int32_t>(appends->size()),
                              case_.head_dim, case_.precision});
    }
    if (error.empty()) {
      error =
          device_.Decode({decodes_.data(), static_cast<int32_t>(decodes_.size()), case_.head_dim,
                          case_.group, case_.precision, case_.out_type, case_.batch_invariant});
    }
    if (error.empty()) error = device_.Wait();
    return error.empty() ? Collect(answer) : error;
  }

 private:
  // A pool with room for every row, and its page ids in random order; page 0 stays unused.
  std::string PlacePages() {
    int64_t needed = 0;
    for (const Row& row : case_.rows) needed += RoundUp(row.seq_len, kPageTokens) / kPageTokens;
    const int64_t pages =
        std::max(needed + 2, (case_.pool_bytes_min + page_stride_ - 1) / page_stride_);
    pool_ = device_.Pool(pages * page_stride_);
    free_pages_.resize(needed);
    std::iota(free_pages_.begin(), free_pages_.end(), static_cast<int32_t>(pages - needed));
    Random(case_.seed).Shuffle(free_pages_);
    std::string error = device_.Poison(pool_, page_stride_);
    if (error.empty()) {
      error = device_.Poison(pool_ + (pages - needed) * page_stride_, needed * page_stride_);
    }
    return error;
  }

  std::string AddRow(int32_t index) {
    const Row& row = case_.rows[index];
    const RowData& data = data_[index];
    const Visible in_cache = InCache(row, unseen_);
    const int32_t* table = nullptr;
    const std::string error = PlaceTable(row, in_cache, &table);
    if (!error.empty()) return error;

    const int64_t layer_bytes = block_bytes_ * row.kv_heads;
    uint8_t* base = pool_ + (case_.layers - 1) * layer_bytes;
    const int64_t token_elements = int64_t{row.kv_heads} * case_.head_dim;
    if (in_cache.first < in_cache.end) {
      AppendRow append{};
      append.k = Stage(data.k) + in_cache.first * token_elements;
      append.v = Stage(data.v) + in_cache.first * token_elements;
      append.block_table = table;
      append.base = base;
      append.page_stride = page_stride_;
      append.pos = in_cache.first;
      append.n = in_cache.end - in_cache.first;
      append.kv_heads = row.kv_heads;
      AddAppend(row, append);
    }
    Output out;
    Output lse;
    const int64_t heads = int64_t{row.q_len} * row.kv_heads * case_.group;
    out.Make(device_, heads * case_.head_dim * (case_.out_type == OutType::kFp32 ? 4 : 2));
    lse.Make(device_, case_.lse ? heads * int64_t{sizeof(float)} : 0);
    outs_.push_back(out);
    lses_.push_back(lse);

    DecodeRow decode{};
    decode.q = Stage(data.q);
    decode.out = out.bytes;
    decode.lse = case_.lse ? reinterpret_cast<float*>(lse.bytes) : nullptr;
    decode.sink_logits = row.sinks ? Stage(data.sink_logits) : nullptr;
    decode.block_table = table;
    decode.base = base;
    decode.page_stride = page_stride_;
    decode.pos = row.pos;
    decode.q_len = row.q_len;
    decode.kv_heads = row.kv_heads;
    decode.window = row.window;
    decode.sm_scale = SmScale(case_, row);
    decode.softcap = row.softcap;
    decodes_.push_back(decode);
    return "";
  }

  // As a daemon does it: the token that a single query stands at comes with the decode.
  void AddAppend(const Row& row, AppendRow all) {
    const int32_t end = all.pos + all.n;
    if (row.q_len != 1 || row.pos + 1 != end) {
      appends_.push_back(all);
      return;
    }
    const int64_t before = int64_t{row.kv_heads} * case_.head_dim * --all.n;
    if (all.n > 0) appends_.push_back(all);
    all.k += before;
    all.v += before;
    all.pos = row.pos;
    all.n = 1;
    last_appends_.push_back(all);
  }

  // Pages for the tokens in the cache; every other entry is poison, one past the end included.
  std::string PlaceTable(const Row& row, Visible in_cache, const int32_t** table) {
    const int64_t entries = RoundUp(row.seq_len, kPageTokens) / kPageTokens + 1;
    std::vector<int32_t> pages(entries, INT32_MAX);
    if (in_cache.first < in_cache.end) {
      for (int32_t i = in_cache.first / kPageTokens; i <= (in_cache.end - 1) / kPageTokens; ++i) {
        pages[i] = free_pages_.back();
        free_pages_.pop_back();
      }
    }
    int32_t* at = device_.Table(entries);
    *table = at;
    return device_.SetTable(at, pages);
  }

  template <class T>
  T* Stage(const std::vector<T>& values) {
    const int64_t bytes = static_cast<int64_t>(values.size() * sizeof(T));
    uint8_t* at = device_.Staging(RoundUp(bytes, kGuardBytes) + kGuardBytes);
    if (bytes > 0) std::memcpy(at, values.data(), bytes);
    return reinterpret_cast<T*>(at);
  }

  std::string Collect(Answer* answer) const {
    *answer = Answer{};
    for (size_t i = 0; i < outs_.size(); ++i) {
      if (!outs_[i].GuardsHold() || !lses_[i].GuardsHold()) {
        return "row " + std::to_string(i) + " wrote outside of its outputs";
      }
      const int64_t element = case_.out_type == OutType::kFp32 ? 4 : 2;
      for (int64_t at = 0; at < outs_[i].size; at += element) {
        if (element == 4) {
          float value = 0.0F;
          std::memcpy(&value, outs_[i].bytes + at, sizeof(value));
          answer->out.push_back(value);
        } else {
          uint16_t bits = 0;
          std::memcpy(&bits, outs_[i].bytes + at, sizeof(bits));
          answer->out.push_back(Bf16ToFloat(bits));
        }
      }
      const size_t lse_count = lses_[i].size / sizeof(float);
      if (lse_count == 0) continue;
      answer->lse.resize(answer->lse.size() + lse_count);
      std::memcpy(answer->lse.data() + answer->lse.size() - lse_count, lses_[i].bytes,
                  lses_[i].size);
    }
    return "";
  }

  Device& device_;
  const Case& case_;
  const std::vector<RowData>& data_;
  const Unseen unseen_;
  int64_t block_bytes_ = 0;
  int64_t page_stride_ = 0;
  uint8_t* pool_ = nullptr;
  std::vector<int32_t> free_pages_;
  std::vector<kernels::AppendRow> appends_;
  std::vector<kernels::AppendRow> last_appends_;  // of the rows that are steps
  std::vector<DecodeRow> decodes_;
  std::vector<Output> outs_;
  std::vector<Output> lses_;
};

// A row's K or V as the cache holds it.
struct Stored {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
};

Stored Store(const std::vector<uint16_t>& rows, int32_t head_dim) {
  Stored stored;
  stored.codes.resize(rows.size());
  stored.scales.resize(rows.size() / head_dim);
  for (size_t i = 0; i < stored.scales.size(); ++i) {
    reference::QuantizeRow(&rows[i * head_dim], head_dim, &stored.codes[i * head_dim],
                           &stored.scales[i]);
  }
  return stored;
}

void Break(Broken broken, std::vector<float>& v_scales) {
  if (broken == Broken::kVScaleTimes105) {
    for (float& scale : v_scales) scale *= 1.05F;
  } else if (broken == Broken::kOneScaleForAll && !v_scales.empty()) {
    std::fill(v_scales.begin(), v_scales.end(), v_scales.front());
  }
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

std::string Launch(Device& device, const Case& c, const std::vector<RowData>& data, Unseen unseen,
                   Answer* answer) {
  return CaseOnDevice(device, c, data, unseen).Run(answer);
}

reference::DecodeOutput Right(const Case& c, const std::vector<RowData>& all_data, Broken broken) {
  reference::DecodeOutput all;
  for (size_t i = 0; i < c.rows.size(); ++i) {
    const Row& row = c.rows[i];
    const RowData& data = all_data[i];
    Stored k;
    Stored v;
    reference::DecodeInput input;
    if (c.precision == Precision::kFp8Kv) {
      k = Store(data.k, c.head_dim);
      v = Store(data.v, c.head_dim);
      Break(broken, v.scales);
      input.k = {k.codes.data(), k.scales.data(), nullptr};
      input.v = {v.codes.data(), v.scales.data(), nullptr};
    } else {
      input.k = {nullptr, nullptr, data.k.data()};
      input.v = {nullptr, nullptr, data.v.data()};
    }
    input.precision = c.precision;
    input.q = data.q.data();
    input.sink_logits = row.sinks ? data.sink_logits.data() : nullptr;
    input.pos = row.pos;
    input.q_len = row.q_len;
    input.kv_heads = row.kv_heads;
    input.group = c.group;
    input.head_dim = c.head_dim;
    input.window = row.window;
    input.sm_scale = SmScale(c, row);
    input.softcap = row.softcap;
    AppendTo(all, reference::Decode(input));
  }
  return all;
}

std::string RunCase(Device& device, const Case& c, const std::vector<RowData>& data,
                    const reference::DecodeOutput& right) {
  Answer answer;
  Answer again;
  std::string error = Launch(device, c, data, Unseen::kPoison, &answer);
  if (error.empty()) error = Launch(device, c, data, Unseen::kTokens, &again);
  if (!error.empty()) return c.name + ": " + error;
  const Verdict verdict = Judge(answer, right, c.out_type);
  if (!verdict.holds) return c.name + ": " + verdict.why;
  if (!SameBits(answer.out, again.out) || !SameBits(answer.lse, again.lse)) {
    return c.name + ": the answer depends on tokens that no query sees";
  }
  return "";
}

std::string RunCase(Device& device, const Case& c) {
  const std::vector<RowData> data = MakeData(c);
  return RunCase(device, c, data, Right(c, data, Broken::kNone));
}

std::string CheckThatBrokenScalesFail() {
  Case c;
  c.name = "broken_scales";
  c.data = Data::kMixedScales;
  c.seed = 7;
  for (int32_t i = 0; i < 32; ++i) {
    Row row;
    row.seq_len = 50 + 10 * i;
    row.pos = row.seq_len - 1;
    row.kv_heads = 2;
    c.rows.push_back(row);
  }
  const std::vector<RowData> data = MakeData(c);
  const reference::DecodeOutput right = Right(c, data, Broken::kNone);
  const auto as_answer = [](const reference::DecodeOutput& output) {
    Answer answer;
    for (const double x : output.out) answer.out.push_back(static_cast<float>(x));
    for (const double x : output.lse) answer.lse.push_back(static_cast<float>(x));
    return answer;
  };
  for (const OutType out_type : {OutType::kFp32, OutType::kBf16}) {
    if (!Judge(as_answer(right), right, out_type).holds) return "the right answer was refused";
    for (const Broken broken : {Broken::kVScaleTimes105, Broken::kOneScaleForAll}) {
      if (Judge(as_answer(Right(c, data, broken)), right, out_type).holds) {
        return broken == Broken::kVScaleTimes105 ? "V scales x 1.05 were not noticed"
                                                 : "one token's scale for all was not noticed";
      }
    }
  }
  return "";
}

}  // namespace fp8kvd::kernels::cases
