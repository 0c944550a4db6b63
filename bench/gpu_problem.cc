#include "bench/gpu_problem.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <thread>

#include "bench/gpu_roof.h"
#include "config/base/check.h"
#include "kernels/bf16.h"
#include "kernels/cuda/any/append.h"
#include "kernels/cuda/page_layout.h"
#include "tests/kernels/cases.h"

namespace fp8kvd::bench {
namespace {

using kernels::AppendRow;
using kernels::DecodeRow;
using kernels::OutType;
using kernels::cases::Random;
using kernels::cuda::BlockBytesOf;
using kernels::cuda::CacheState;
using kernels::cuda::DecodeArgs;
using kernels::cuda::DecodeKernel;
using kernels::cuda::DecodeTable;
using kernels::cuda::FindDecodeKernel;
using kernels::cuda::GroupInverse;
using kernels::cuda::kTileTokens;
using kernels::cuda::LaunchAppend;
using kernels::cuda::LaunchShape;
using kernels::cuda::LaunchWork;
using kernels::cuda::NewToken;
using kernels::cuda::PieceFloats;
using kernels::cuda::ShapeFor;
using kernels::cuda::WorkOfRows;

constexpr int64_t kPoolBytes = int64_t{20} << 30;
constexpr int64_t kRotatedBytes = int64_t{320} << 20;
constexpr int32_t kCopiesMax = 512;
constexpr int32_t kReplays = 9;
constexpr int32_t kTurns = 19;  // replays of each, where two are compared
constexpr int32_t kWarmReplays = 2;
constexpr double kSustainedMs = 600.0;
// A board that was busy rests so many times as long: at its power limit it lowers its clocks within
// 60 ms, and they stay low for 200 of what comes next.
constexpr double kRestOfBusy = 4.0;

// Places in the scratch memory.
constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kNoiseAt = 0;  // K, V and q rows
constexpr int64_t kNoiseBytes = 256 * kMiB;
constexpr int64_t kOutAt = kNoiseAt + kNoiseBytes;
constexpr int64_t kOutBytes = 256 * kMiB;
constexpr int64_t kRowsAt = kOutAt + kOutBytes;
constexpr int64_t kRowsBytes = 64 * kMiB;
constexpr int64_t kTableAt = kRowsAt + kRowsBytes;
constexpr int64_t kTableBytes = 64 * kMiB;
constexpr int64_t kAppendRowsAt = kTableAt + kTableBytes;
constexpr int64_t kAppendRowsBytes = 64 * kMiB;
constexpr int64_t kPiecesAt = kAppendRowsAt + kAppendRowsBytes;
constexpr int64_t kPiecesBytes = 1024 * kMiB;
constexpr int64_t kScratchBytes = kPiecesAt + kPiecesBytes;

int64_t Pages(int32_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

}  // namespace

void Must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::abort();
}

int64_t Shape::KvBytes() const {
  const int64_t tokens = std::accumulate(kv_lens.begin(), kv_lens.end(), int64_t{0});
  return tokens * kv_heads * KvBytesPerToken(precision, head_dim);
}

// A shape laid out on the device, `copies` times.
struct Gpu::Problem {
  Shape shape;
  int32_t copies = 0;
  int64_t copy_bytes = 0;
  std::vector<DecodeRow> rows;  // of the first copy
  const DecodeRow* device_rows = nullptr;
  // The last token of each sequence, written again.
  const NewToken* device_tokens = nullptr;

  int32_t launches() const { return std::max(20, copies); }
};

Gpu::Gpu() {
  Must(cudaGetDeviceProperties(&properties_, 0), "asking the device");
  limits_ = {properties_.multiProcessorCount,
             static_cast<int32_t>(properties_.sharedMemPerMultiprocessor),
             static_cast<int32_t>(properties_.sharedMemPerBlockOptin)};
  Must(cudaStreamCreate(&stream_), "making a stream");
  Must(cudaMalloc(reinterpret_cast<void**>(&pool_), kPoolBytes), "taking the pool");
  Must(cudaMalloc(reinterpret_cast<void**>(&scratch_), kScratchBytes), "taking scratch memory");
  uint8_t* counters = nullptr;
  Must(cudaMalloc(reinterpret_cast<void**>(&counters), kMiB), "taking counters");
  Must(cudaMemset(counters, 0, kMiB), "zeroing counters");
  workspace_.pieces = reinterpret_cast<float*>(scratch_ + kPiecesAt);
  workspace_.piece_flags = reinterpret_cast<uint32_t*>(counters);
  workspace_.progress = reinterpret_cast<uint32_t*>(counters + kMiB / 4);
  std::vector<uint16_t> noise(kNoiseBytes / 2);
  Random random(1);
  for (size_t i = 0; i < noise.size(); ++i) {
    // New numbers for the first 16 MiB, then the same ones again, displaced.
    constexpr size_t kFresh = 8 * kMiB;
    noise[i] = i < kFresh ? kernels::FloatToBf16(random.Normal()) : noise[i - kFresh + 7];
  }
  Upload(noise.data(), kNoiseBytes, kNoiseAt, scratch_);
  for (const DecodeKernel& kernel : DecodeTable()) {
    Must(kernel.prepare(limits_.shared_per_cta), "loading a kernel");
  }
}

void Gpu::Upload(const void* from, int64_t bytes, int64_t offset, uint8_t* to) const {
  Must(cudaMemcpy(to + offset, from, bytes, cudaMemcpyHostToDevice), "uploading");
}

void Gpu::Fill(Precision precision, int32_t head_dim) {
  if (filled_head_dim_ == head_dim && filled_ == precision) return;
  const int64_t block = BlockBytesOf(precision, head_dim);
  constexpr int32_t kTokens = 64 * 1024;  // appended once, then copied over the whole pool
  const int64_t pages = Pages(kTokens);
  std::vector<int32_t> table(pages);
  std::iota(table.begin(), table.end(), 0);
  Upload(table.data(), pages * 4, kTableAt, scratch_);
  const auto* noise = reinterpret_cast<const uint16_t*>(scratch_ + kNoiseAt);
  const AppendRow row = {noise,
                         noise + 9 * kMiB,
                         reinterpret_cast<int32_t*>(scratch_ + kTableAt),
                         pool_,
                         block,
                         0,
                         kTokens,
                         1};
  Upload(&row, sizeof(row), kAppendRowsAt, scratch_);
  const auto* rows = reinterpret_cast<const AppendRow*>(scratch_ + kAppendRowsAt);
  Must(LaunchAppend({.params = {rows, 1, head_dim, precision}, .tiles_max = kTokens / kTileTokens},
                    stream_),
       "filling");
  for (int64_t done = pages * block; done < kPoolBytes;) {
    const int64_t bytes = std::min(done, kPoolBytes - done);
    Must(cudaMemcpyAsync(pool_ + done, pool_, bytes, cudaMemcpyDeviceToDevice, stream_), "filling");
    done += bytes;
  }
  Must(cudaStreamSynchronize(stream_), "filling");
  filled_ = precision;
  filled_head_dim_ = head_dim;
}

Gpu::Problem Gpu::Place(const Shape& shape) {
  Fill(shape.precision, shape.head_dim);
  Problem problem;
  problem.shape = shape;
  const int64_t stride = int64_t{BlockBytesOf(shape.precision, shape.head_dim)} * shape.kv_heads;
  int64_t pages = 0;
  for (const int32_t len : shape.kv_lens) pages += Pages(len);
  problem.copy_bytes = pages * stride;
  FP8KVD_CHECK(problem.copy_bytes > 0);
  problem.copies =
      static_cast<int32_t>(std::min<int64_t>(kRotatedBytes / problem.copy_bytes + 1, kCopiesMax));
  std::vector<int32_t> table(pages);
  std::iota(table.begin(), table.end(), 0);
  Random(7).Shuffle(table);
  Upload(table.data(), pages * 4, kTableAt, scratch_);

  std::vector<DecodeRow> rows;
  std::vector<NewToken> tokens;
  const auto* noise = reinterpret_cast<const uint16_t*>(scratch_ + kNoiseAt);
  const int64_t q_elements = int64_t{shape.q_len} * shape.q_heads * shape.head_dim;
  for (int32_t copy = 0; copy < problem.copies; ++copy) {
    const auto* entry = reinterpret_cast<const int32_t*>(scratch_ + kTableAt);
    for (size_t i = 0; i < shape.kv_lens.size(); ++i) {
      DecodeRow row{};
      row.q = noise + i * q_elements;
      row.out = scratch_ + kOutAt + i * q_elements * 2;
      row.block_table = entry;
      row.base = pool_ + copy * problem.copy_bytes;
      row.page_stride = stride;
      row.pos = shape.kv_lens[i] - shape.q_len;
      row.q_len = shape.q_len;
      row.kv_heads = shape.kv_heads;
      row.sm_scale = 1.0F / std::sqrt(static_cast<float>(shape.head_dim));
      rows.push_back(row);
      tokens.push_back({noise + i * q_elements, noise + i * q_elements + 1024});
      entry += Pages(shape.kv_lens[i]);
    }
  }
  Upload(rows.data(), static_cast<int64_t>(rows.size() * sizeof(DecodeRow)), kRowsAt, scratch_);
  Upload(tokens.data(), static_cast<int64_t>(tokens.size() * sizeof(NewToken)), kAppendRowsAt,
         scratch_);
  rows.resize(shape.kv_lens.size());
  problem.rows = rows;
  problem.device_rows = reinterpret_cast<const DecodeRow*>(scratch_ + kRowsAt);
  problem.device_tokens = reinterpret_cast<const NewToken*>(scratch_ + kAppendRowsAt);
  return problem;
}

void Gpu::Rest() {
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(kRestOfBusy * busy_ms_));
  busy_ms_ = 0.0;
}

std::vector<double> Gpu::MediansUs(int32_t launches, const std::vector<Operation>& operations,
                                   double warm_ms) {
  struct Timed {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    std::vector<double> times;
  };
  std::vector<Timed> all(operations.size());
  for (size_t k = 0; k < all.size(); ++k) {
    const Operation& launch = operations[k];
    launch(0);
    Must(cudaStreamSynchronize(stream_), "the first launch");
    Must(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "capturing");
    for (int32_t i = 0; i < launches; ++i) launch(i);
    Must(cudaStreamEndCapture(stream_, &all[k].graph), "capturing");
    Must(cudaGraphInstantiate(&all[k].replay, all[k].graph, 0), "making a graph");
  }
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  Must(cudaEventCreate(&begin), "making an event");
  Must(cudaEventCreate(&end), "making an event");
  const auto replay = [&](const Timed& timed) {
    Must(cudaEventRecord(begin, stream_), "timing");
    Must(cudaGraphLaunch(timed.replay, stream_), "replaying");
    Must(cudaEventRecord(end, stream_), "timing");
    Must(cudaEventSynchronize(end), "replaying");
    float ms = 0.0F;
    Must(cudaEventElapsedTime(&ms, begin, end), "timing");
    busy_ms_ += static_cast<double>(ms);
    return 1e3 * static_cast<double>(ms) / launches;
  };
  if (all.size() == 1) Rest();
  for (int32_t i = 0; i < kWarmReplays || busy_ms_ < warm_ms; ++i) {
    for (const Timed& timed : all) replay(timed);
  }
  const int32_t replays = all.size() > 1 ? kTurns : kReplays;
  for (int32_t i = 0; i < replays; ++i) {
    for (Timed& timed : all) timed.times.push_back(replay(timed));
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  uint32_t progress = 0;
  Must(cudaMemcpy(&progress, workspace_.progress, sizeof(progress), cudaMemcpyDeviceToHost),
       "reading the progress");
  FP8KVD_CHECK(progress == 0);  // every launch leaves it as it found it
  std::vector<double> medians;
  for (Timed& timed : all) {
    cudaGraphExecDestroy(timed.replay);
    cudaGraphDestroy(timed.graph);
    std::sort(timed.times.begin(), timed.times.end());
    medians.push_back(timed.times[timed.times.size() / 2]);
  }
  return medians;
}

Gpu::Operation Gpu::DecodeOf(const Problem& problem, const Variant& variant) const {
  const Shape& shape = problem.shape;
  const int32_t group = shape.group();
  const DecodeKernel* kernel =
      FindDecodeKernel(variant.sm, shape.precision, shape.head_dim, shape.q_len * group);
  const auto count = static_cast<int32_t>(problem.rows.size());
  // The rows that are cut into items (longest first), then those whose pairs are alone.
  const std::span<const DecodeRow> rows = problem.rows;
  const auto is_cut = [&](const DecodeRow& row) {
    return variant.batch_invariant && PairsAlone(*kernel, row, group) == 0;
  };
  const auto cut = static_cast<int32_t>(std::ranges::find_if_not(rows, is_cut) - rows.begin());
  const LaunchWork cut_work = WorkOfRows(rows.first(cut), group, kernel->grain, true);
  const LaunchWork whole_work = WorkOfRows(rows.subspan(cut), group, kernel->grain, false);
  if (cut_work.items * PieceFloats(kernel->grain.columns, shape.head_dim) * 4 > kPiecesBytes) {
    std::fprintf(stderr, "a batch_invariant cell needs more room for pieces\n");
    std::abort();
  }
  DecodeArgs args = workspace_;
  args.group = group;
  args.group_inverse = GroupInverse(group);
  args.out_type = OutType::kBf16;
  args.cache = variant.with_append ? CacheState::kBelowQueries : CacheState::kSettled;
  const DecodeRow* all_rows = problem.device_rows;
  const NewToken* tokens = variant.with_append ? problem.device_tokens : nullptr;
  const int32_t copies = problem.copies;
  return [=, this](int32_t index) mutable {
    const int64_t first = int64_t{index % copies} * count;
    if (tokens != nullptr) args.tokens = tokens + first;
    args.rows = all_rows + first;
    args.rows_count = cut;
    args.batch_invariant = true;
    if (cut > 0) {
      const LaunchShape items = ShapeFor(*kernel, limits_, rows.first(cut), group, cut_work);
      Must(kernel->launch(args, items, stream_), "decoding");
    }
    args.rows += cut;
    args.rows_count = count - cut;
    args.batch_invariant = false;
    if (args.rows_count == 0) return;
    const LaunchShape whole =
        variant.batch_invariant ? ShapeOfPairsAlone(*kernel, limits_, whole_work)
                                : ShapeFor(*kernel, limits_, rows.subspan(cut), group, whole_work);
    Must(kernel->launch(args, whole, stream_), "decoding");
  };
}

double Gpu::DecodeUs(const Shape& shape) {
  const Problem problem = Place(shape);
  return MediansUs(problem.launches(), {DecodeOf(problem, Variant{})})[0];
}

double Gpu::SustainedDecodeUs(const Shape& shape) {
  const Problem problem = Place(shape);
  return MediansUs(problem.launches(), {DecodeOf(problem, Variant{})}, kSustainedMs)[0];
}

Gpu::Beside Gpu::DecodeBesideDefault(const Shape& shape, const Variant& variant) {
  const Problem problem = Place(shape);
  const std::vector<double> us =
      MediansUs(problem.launches(), {DecodeOf(problem, variant), DecodeOf(problem, Variant{})});
  return {us[0], us[1]};
}

Gpu::Append Gpu::BulkAppend(Precision precision, int32_t head_dim, int32_t seqs, int32_t kv_heads,
                            int32_t n) {
  Shape shape;
  shape.kv_lens.assign(seqs, n);
  shape.q_heads = shape.kv_heads = kv_heads;
  shape.head_dim = head_dim;
  shape.precision = precision;
  const Problem problem = Place(shape);
  const int64_t elements = int64_t{n} * kv_heads * head_dim;
  const auto* noise = reinterpret_cast<const uint16_t*>(scratch_ + kNoiseAt);
  const int64_t noise_elements = kNoiseBytes / 2;
  std::vector<AppendRow> rows;
  for (int32_t copy = 0; copy < problem.copies; ++copy) {
    for (int32_t i = 0; i < seqs; ++i) {
      const DecodeRow& row = problem.rows[i];
      const int64_t at = (int64_t{copy * seqs + i} * 2 * elements) % (noise_elements / 2);
      rows.push_back({noise + at, noise + at + elements, row.block_table,
                      pool_ + copy * problem.copy_bytes, row.page_stride, 0, n, kv_heads});
    }
  }
  Upload(rows.data(), static_cast<int64_t>(rows.size() * sizeof(AppendRow)), kAppendRowsAt,
         scratch_);
  const auto* device_rows = reinterpret_cast<const AppendRow*>(scratch_ + kAppendRowsAt);
  Append result{};
  const Operation append = [&](int32_t index) {
    const AppendRow* of_copy = device_rows + int64_t{index % problem.copies} * seqs;
    Must(LaunchAppend({.params = {of_copy, seqs, head_dim, precision},
                       .tiles_max = (n + kTileTokens - 1) / kTileTokens * kv_heads,
                       .tables_settled = true},
                      stream_),
         "appending");
  };
  result.us = MediansUs(problem.launches(), {append})[0];
  result.bytes = 4 * elements * seqs + shape.KvBytes();
  filled_head_dim_ = 0;  // the pool holds other data now
  return result;
}

double Gpu::ReadGbps() {
  constexpr int64_t kBytes = int64_t{8} << 30;
  const Operation read = [&](int32_t index) {
    Must(LaunchRead(pool_ + index % 2 * kBytes, kBytes, workspace_.piece_flags + 1024, stream_),
         "reading");
  };
  return static_cast<double>(kBytes) / MediansUs(3, {read})[0] / 1e3;
}

double Gpu::CopyGbps() {
  constexpr int64_t kBytes = int64_t{8} << 30;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  Must(cudaEventCreate(&begin), "making an event");
  Must(cudaEventCreate(&end), "making an event");
  std::vector<double> times;
  for (int32_t i = 0; i < 5; ++i) {  // not in a graph, where copies take the slower engines
    Must(cudaEventRecord(begin, stream_), "timing");
    Must(cudaMemcpyAsync(pool_ + kBytes, pool_, kBytes, cudaMemcpyDeviceToDevice, stream_),
         "copying");
    Must(cudaEventRecord(end, stream_), "timing");
    Must(cudaEventSynchronize(end), "copying");
    float ms = 0.0F;
    Must(cudaEventElapsedTime(&ms, begin, end), "timing");
    times.push_back(static_cast<double>(ms));
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  filled_head_dim_ = 0;
  return 2.0 * static_cast<double>(kBytes) / times[times.size() / 2] / 1e6;
}

}  // namespace fp8kvd::bench
