#include "kernels/cpu/decode.h"

#include <algorithm>
#include <cmath>

#include "kernels/bf16.h"
#include "kernels/cpu/float_mode.h"
#include "kernels/cpu/page_layout.h"
#include "kernels/cpu/targets.h"
#include "kernels/partial.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/decode.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "kernels/cpu/decode-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fp8kvd::kernels::cpu::HWY_NAMESPACE {

// Query token and head of a column: columns are [q_len, group] of one KV head.
const uint16_t* QueryOf(const DecodeParams& params, const DecodeRow& row, int32_t kv_head,
                        int32_t column) {
  const int64_t token = column / params.group;
  const int64_t q_head = int64_t{kv_head} * params.group + column % params.group;
  return row.q + (token * row.kv_heads * params.group + q_head) * params.head_dim;
}

// All columns of a unit as fp32, kQueryStride apart.
void WidenQueries(const DecodeParams& params, int32_t row_index, int32_t kv_head, float* q) {
  const DecodeRow& row = params.rows[row_index];
  const hn::Rebind<uint16_t, DF> d16;
  const hn::Rebind<uint32_t, DF> d32;
  for (int32_t column = 0; column < row.q_len * params.group; ++column) {
    const uint16_t* from = QueryOf(params, row, kv_head, column);
    for (int32_t i = 0; i < params.head_dim; i += kLanes) {
      const auto bits = hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, from + i)));
      hn::Store(hn::BitCast(DF(), bits), DF(), q + column * kQueryStride + i);
    }
  }
}

// What the columns from column_begin on see of a page, relative to its first token.
void SetColumns(const DecodeRow& row, int32_t group, int32_t column_begin, int32_t columns,
                int32_t page_token, PageWork& work) {
  for (int32_t c = 0; c < columns; ++c) {
    const int32_t last = row.pos + (column_begin + c) / group;
    const int32_t first = row.window == 0 ? 0 : std::max(0, last - row.window + 1);
    work.column_first[c] = std::max(first - page_token, work.first);
    work.column_end[c] = std::min(last + 1 - page_token, work.end);
  }
}

// Where the K lies that is read after that of `page`: of the row's next page, or of its first page
// for the next KV head; the page itself if there is none. It is only fetched, so it need not be
// right.
const uint8_t* NextBlock(const DecodeRow& row, const RowSplits& splits, int64_t block_bytes,
                         int32_t kv_head, int32_t page) {
  if (page + 1 < splits.end_page) {
    ++page;
  } else if (kv_head + 1 < row.kv_heads) {
    page = splits.first_page;
    ++kv_head;
  }
  return row.base + row.block_table[page] * row.page_stride + kv_head * block_bytes;
}

// Attends to pages [page_begin, page_end) of one unit. q: as WidenQueries left it. scores: room for
// kColumnsMax columns.
void AttendPages(const DecodeParams& params, const RowSplits& splits, const UnitPart& unit,
                 int32_t page_begin, int32_t page_end, const float* q, float* scores,
                 const Partial& partial) {
  const DecodeRow& row = params.rows[unit.row];
  const PageLayout layout{params.precision, params.head_dim};
  const int32_t columns = row.q_len * params.group;
  std::fill(partial.max, partial.max + columns, kMinusInfinity);
  std::fill(partial.sum, partial.sum + columns, 0.0F);
  std::fill(partial.o, partial.o + int64_t{columns} * params.head_dim, 0.0F);
  const int32_t row_first = row.window == 0 ? 0 : std::max(0, row.pos - row.window + 1);
  const int32_t row_end = row.pos + row.q_len;
  const int32_t blocks = (columns + kColumnsMax - 1) / kColumnsMax;

  PageWork work{};
  work.layout = layout;
  work.sm_scale = row.sm_scale;
  work.softcap = row.softcap;
  work.scores = scores;
  for (int32_t page = page_begin; page < page_end; ++page) {
    const int32_t page_token = page * kPageTokens;
    work.block =
        row.base + row.block_table[page] * row.page_stride + unit.kv_head * layout.block_bytes();
    work.next_block = NextBlock(row, splits, layout.block_bytes(), unit.kv_head, page);
    work.first = std::max(row_first - page_token, 0);
    work.end = std::min(row_end - page_token, kPageTokens);
    int32_t column = 0;
    for (int32_t block = 0; block < blocks; ++block) {  // of nearly equal numbers of columns
      const int32_t next = (block + 1) * columns / blocks;
      SetColumns(row, params.group, column, next - column, page_token, work);
      work.q = q + int64_t{column} * kQueryStride;
      work.max = partial.max + column;
      work.sum = partial.sum + column;
      work.o = partial.o + int64_t{column} * params.head_dim;
      if (params.precision == Precision::kFp8Kv) {
        AttendPageOf<Precision::kFp8Kv>(next - column, work);
      } else {
        AttendPageOf<Precision::kBf16>(next - column, work);
      }
      column = next;
    }
  }
}

// total = total and split together, for `columns` columns.
void MergeInto(const Partial& total, const Partial& split, int32_t columns, int32_t head_dim) {
  for (int32_t c = 0; c < columns; ++c) {
    const MergedDenominator merged =
        Merge({total.max[c] * kLn2, total.sum[c]}, {split.max[c] * kLn2, split.sum[c]});
    float* o = total.o + int64_t{c} * head_dim;
    const float* more = split.o + int64_t{c} * head_dim;
    const VF weight_o = hn::Set(DF(), merged.weight_a);
    const VF weight_more = hn::Set(DF(), merged.weight_b);
    for (int32_t i = 0; i < head_dim; i += kLanes) {
      const VF weighted = hn::Mul(weight_more, hn::Load(DF(), more + i));
      hn::Store(hn::MulAdd(weight_o, hn::Load(DF(), o + i), weighted), DF(), o + i);
    }
    total.max[c] = std::max(total.max[c], split.max[c]);
    total.sum[c] = merged.both.sum;
  }
}

}  // namespace fp8kvd::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fp8kvd::kernels::cpu {
namespace {

HWY_EXPORT(WidenQueries);
HWY_EXPORT(AttendPages);
HWY_EXPORT(MergeInto);

// One launch on its threads.
class Launch {
 public:
  Launch(const DecodeParams& params, DecodeWorkspace& workspace)
      : params_(params), workspace_(workspace) {}

  // Attends to all that lies in this thread's share; finishes the units that are wholly in it.
  void Attend(int32_t thread) {
    if (thread >= workspace_.plan.threads()) return;
    workspace_.plan.ForEachPart(thread, params_, [&](const UnitPart& part) {
      HWY_DYNAMIC_DISPATCH(WidenQueries)(params_, part.row, part.kv_head, workspace_.q(thread));
      if (!part.whole) {
        if (part.owner == thread) workspace_.cuts[thread] = part;
        for (int32_t split = part.begin; split < part.end; ++split) {
          AttendSplit(thread, part, split, workspace_.shared(part.owner, split));
        }
        return;
      }
      const Partial total = workspace_.total(thread);
      AttendSplit(thread, part, 0, total);
      for (int32_t split = 1; split < part.end; ++split) {
        AttendSplit(thread, part, split, workspace_.split(thread));
        HWY_DYNAMIC_DISPATCH(MergeInto)
        (total, workspace_.split(thread), Columns(part), params_.head_dim);
      }
      Finish(part, total);
    });
  }

  // Merges the cut unit that this thread began, if there is one.
  void MergeCut(int32_t thread) {
    const UnitPart& cut = workspace_.cuts[thread];
    if (cut.row < 0) return;
    const Partial total = workspace_.shared(thread, 0);
    for (int32_t split = 1; split < workspace_.plan.row(cut.row).splits; ++split) {
      HWY_DYNAMIC_DISPATCH(MergeInto)
      (total, workspace_.shared(thread, split), Columns(cut), params_.head_dim);
    }
    Finish(cut, total);
  }

 private:
  int32_t Columns(const UnitPart& part) const {
    return params_.rows[part.row].q_len * params_.group;
  }

  void AttendSplit(int32_t thread, const UnitPart& part, int32_t split, const Partial& to) {
    const RowSplits& splits = workspace_.plan.row(part.row);
    const int32_t begin = splits.first_page + split * splits.split_pages;
    const int32_t end = std::min(begin + splits.split_pages, splits.end_page);
    HWY_DYNAMIC_DISPATCH(AttendPages)
    (params_, splits, part, begin, end, workspace_.q(thread), workspace_.scores(thread), to);
  }

  // Sinks, division, output.
  void Finish(const UnitPart& part, const Partial& total) const {
    const DecodeRow& row = params_.rows[part.row];
    const float unit = params_.precision == Precision::kFp8Kv ? kCodeUnit : 1.0F;
    const int64_t q_heads = int64_t{row.kv_heads} * params_.group;
    for (int32_t c = 0; c < Columns(part); ++c) {
      const int64_t q_head = int64_t{part.kv_head} * params_.group + c % params_.group;
      const int64_t at = c / params_.group * q_heads + q_head;
      const Denominator keys{total.max[c] * kLn2, total.sum[c]};
      const Denominator sink =
          row.sink_logits == nullptr ? Denominator{} : FromLse(row.sink_logits[q_head]);
      const MergedDenominator merged = Merge(keys, sink);
      const float factor = IsEmpty(keys) ? 0.0F : unit * merged.weight_a / merged.both.sum;
      WriteOutput(row.out, at * params_.head_dim, total.o + int64_t{c} * params_.head_dim, factor);
      if (row.lse != nullptr) row.lse[at] = Lse(merged.both);
    }
  }

  void WriteOutput(void* out, int64_t at, const float* o, float factor) const {
    if (params_.out_type == OutType::kFp32) {
      float* to = static_cast<float*>(out) + at;
      for (int32_t i = 0; i < params_.head_dim; ++i) to[i] = o[i] * factor;
    } else {
      uint16_t* to = static_cast<uint16_t*>(out) + at;
      for (int32_t i = 0; i < params_.head_dim; ++i) to[i] = FloatToBf16(o[i] * factor);
    }
  }

  const DecodeParams& params_;
  DecodeWorkspace& workspace_;
};

void AttendTask(void* launch, int32_t thread) {
  const FloatMode mode(Subnormals::kFlush);
  static_cast<Launch*>(launch)->Attend(thread);
}

void MergeTask(void* launch, int32_t thread) {
  const FloatMode mode(Subnormals::kFlush);
  static_cast<Launch*>(launch)->MergeCut(thread);
}

}  // namespace

void DecodeWorkspace::Reserve(int32_t rows_max, int32_t columns_max, int32_t head_dim_max,
                              int32_t threads) {
  columns_max_ = std::max(columns_max_, columns_max);
  head_dim_max_ = std::max(head_dim_max_, head_dim_max);
  threads_ = std::max(threads_, threads);
  plan.Reserve(rows_max);
  cuts.resize(threads_);
  q_floats_ = int64_t{columns_max_} * kQueryStride;
  score_floats_ = int64_t{kColumnsMax} * kScoreStride;
  column_floats_ = (columns_max_ + kTile - 1) / kTile * kTile;
  partial_floats_ = 2 * column_floats_ + int64_t{columns_max_} * head_dim_max_;
  thread_floats_ = q_floats_ + score_floats_ + 2 * partial_floats_;
  const int64_t floats = threads_ * (thread_floats_ + kSplitsMax * partial_floats_);
  memory_.reset(new (std::align_val_t{kAlignment}) float[floats]);
  shared_ = memory_.get() + threads_ * thread_floats_;
}

void Decode(const DecodeParams& params, DecodeWorkspace& workspace, Workers& workers) {
  workspace.plan.Make(params, workers.threads());
  const int32_t threads = workspace.plan.threads();
  std::fill(workspace.cuts.begin(), workspace.cuts.end(), UnitPart{-1, 0, 0, 0, 0, false});
  Launch launch(params, workspace);
  if (threads == 1) {
    AttendTask(&launch, 0);
    return;
  }
  workers.Run(&AttendTask, &launch);
  const auto is_cut = [](const UnitPart& cut) { return cut.row >= 0; };
  const auto cuts = std::count_if(workspace.cuts.begin(), workspace.cuts.end(), is_cut);
  if (cuts == 1) {
    const auto cut = std::find_if(workspace.cuts.begin(), workspace.cuts.end(), is_cut);
    MergeTask(&launch, static_cast<int32_t>(cut - workspace.cuts.begin()));
  } else if (cuts > 1) {
    workers.Run(&MergeTask, &launch);
  }
}

}  // namespace fp8kvd::kernels::cpu
#endif  // HWY_ONCE
