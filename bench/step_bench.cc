// bench/step_bench.cc: one step through the CUDA backend alone, from rows in host staging to
// results in host staging: Append, Decode, Fence, and polling until it has passed. 64/8 heads,
// d128.
//   latency   p50 and p99 of one step at a time, by each way the bytes can take (step_path.h) and
//             by the default choice; `calls_us` is what the caller's thread spends in the calls
//   stream    time of a step with the next one queued behind it, against the kernels alone
//   bus       what the copy engines move: in, out, both at once
// Results are compared with those of the first way; fp8kv_kernel_test has the reference.
// Needs a driver and nothing else. Run: fp8kv_step_bench [--json=FILE]
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include "config/base/check.h"
#include "kernels/bf16.h"
#include "kernels/cuda/backend.h"
#include "tests/kernels/cases.h"

namespace fp8kvd::bench {
namespace {

using Clock = std::chrono::steady_clock;
using kernels::AppendRow;
using kernels::DecodeRow;
using kernels::cuda::CudaOptions;
using kernels::cuda::StepLimits;

constexpr int32_t kQHeads = 64;
constexpr int32_t kKvHeads = 8;
constexpr int32_t kHeadDim = 128;
constexpr int32_t kItemsLimit = 256;
constexpr int32_t kSets = 3;  // of staging: steps under way at a time
constexpr int64_t kQBytes = int64_t{kQHeads} * kHeadDim * 2;
constexpr int64_t kKvBytes = int64_t{kKvHeads} * kHeadDim * 2;
constexpr int64_t kItemBytes = 2 * kQBytes + 2 * kKvBytes;  // q, k, v and out
constexpr int64_t kItemBytesMax = int64_t{64} << 10;        // of an item in a message
static_assert(kItemBytes <= kItemBytesMax);
constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

double UsSince(Clock::time_point from) {
  return std::chrono::duration<double, std::micro>(Clock::now() - from).count();
}

template <class T>
T Must(absl::StatusOr<T> value) {
  if (value.ok()) return *std::move(value);
  std::fprintf(stderr, "%s\n", value.status().ToString().c_str());
  std::abort();
}
void Must(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::abort();
}
void MustCuda(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::abort();
}

struct Way {
  const char* name;
  StepLimits limits;
};

std::vector<Way> Ways() {
  std::vector<Way> ways;
  StepLimits fetch;
  fetch.step_rows_max = fetch.near_rows_max = 0;
  fetch.copy_bytes_min = fetch.out_copy_bytes_min = kNone;
  ways.push_back({"fetch", fetch});
  StepLimits near = fetch;
  near.step_rows_max = near.near_rows_max = kItemsLimit;
  ways.push_back({"near", near});
  StepLimits copied = fetch;
  copied.copy_bytes_min = 0;
  ways.push_back({"copied", copied});
  copied.out_copy_bytes_min = 0;
  ways.push_back({"copied in and out", copied});
  ways.push_back({"default", StepLimits{}});
  return ways;
}

// Items of one length over a pool of noise, with several sets of staging so that steps overlap.
class Steps {
 public:
  Steps(const Way& way, Precision precision, int32_t kv_len) : precision_(precision) {
    CudaOptions options;
    options.step = way.limits;
    backend_ = Must(kernels::cuda::MakeCudaBackend(options));
    const kernels::KernelShape shape = {kHeadDim, kQHeads / kKvHeads, precision};
    Must(backend_->WarmUp(absl::MakeConstSpan(&shape, 1), kItemsLimit, 1, kQHeads));
    pages_ = (kv_len + kPageTokens - 1) / kPageTokens;
    stride_ = backend_->BlockBytes(precision, kHeadDim) * kKvHeads;
    pool_ = Must(backend_->AllocPool(kItemsLimit * pages_ * stride_));
    table_ = Must(backend_->AllocTable(int64_t{kItemsLimit} * pages_));
    staging_ = Must(backend_->AllocStaging(kSets * kItemsLimit * kItemBytesMax));
    pos_ = kv_len - 1;
    Fill();
  }

  // Queues a step; returns its fence. The items lie in so many messages, as many in each.
  kernels::FenceId Queue(int32_t items, int32_t messages, bool append, int32_t set) {
    uint8_t* const base = staging_ + set * kItemsLimit * kItemBytesMax;
    const int32_t each = items / messages;
    appends_.clear();
    rows_.clear();
    for (int32_t i = 0; i < items; ++i) {
      uint8_t* const message = base + i / each * each * kItemBytesMax;
      const int32_t at = i % each;
      uint8_t* const q = message + at * kQBytes;
      uint8_t* const k = message + each * kQBytes + at * kKvBytes;
      uint8_t* const v = k + each * kKvBytes;
      uint8_t* const out = message + each * (kQBytes + 2 * kKvBytes) + at * kQBytes;
      const int32_t* table = table_ + int64_t{i} * pages_;
      appends_.push_back({reinterpret_cast<uint16_t*>(k), reinterpret_cast<uint16_t*>(v), table,
                          pool_, stride_, pos_, 1, kKvHeads});
      DecodeRow row{};
      row.q = reinterpret_cast<uint16_t*>(q);
      row.out = out;
      row.block_table = table;
      row.base = pool_;
      row.page_stride = stride_;
      row.pos = pos_;
      row.q_len = 1;
      row.kv_heads = kKvHeads;
      row.sm_scale = 1.0F / std::sqrt(static_cast<float>(kHeadDim));
      rows_.push_back(row);
    }
    const Clock::time_point start = Clock::now();
    if (append) Must(backend_->Append({appends_.data(), items, kHeadDim, precision_}));
    Must(backend_->Decode({rows_.data(), items, kHeadDim, kQHeads / kKvHeads, precision_,
                           kernels::OutType::kBf16, false}));
    const kernels::FenceId fence = Must(backend_->Fence());
    calls_us_ = UsSince(start);
    return fence;
  }
  void Wait(kernels::FenceId fence) {
    while (!Must(backend_->Passed(fence))) {
    }
  }
  double calls_us() const { return calls_us_; }

  // The first set's results.
  std::vector<float> Results() const {
    std::vector<float> out;
    for (const DecodeRow& row : rows_) {
      const auto* values = static_cast<const uint16_t*>(row.out);
      for (int64_t i = 0; i < kQBytes / 2; ++i) out.push_back(kernels::Bf16ToFloat(values[i]));
    }
    return out;
  }
  void SpoilResults() {
    for (const DecodeRow& row : rows_) std::memset(row.out, 0xFF, kQBytes);
  }

 private:
  void Fill() {
    std::vector<kernels::TableEdit> edits;
    edits.reserve(kItemsLimit * pages_);
    for (int32_t i = 0; i < kItemsLimit * pages_; ++i) {
      edits.push_back({table_ + i, kItemsLimit * static_cast<int32_t>(pages_) - 1 - i});
    }
    Must(backend_->UpdateTables(edits));
    kernels::cases::Random random(11);
    auto* values = reinterpret_cast<uint16_t*>(staging_);
    for (int64_t i = 0; i < kSets * kItemsLimit * kItemBytesMax / 2; ++i) {
      values[i] = kernels::FloatToBf16(random.Normal());
    }
    // The tokens before: those of all items in slices, from noise at moving places.
    for (int32_t i = 0; i < kItemsLimit; ++i) {
      for (int32_t pos = 0; pos < pos_; pos += kSlice) {
        const int32_t n = std::min(kSlice, pos_ - pos);
        const uint16_t* from = values + (i * 97 + pos) % 4096 * 128;
        const AppendRow row = {from, from + 8192 * 16, table_ + i * pages_, pool_, stride_, pos,
                               n,    kKvHeads};
        Must(backend_->Append({&row, 1, kHeadDim, precision_}));
      }
      Wait(Must(backend_->Fence()));
    }
  }

  static constexpr int32_t kSlice = 256;
  const Precision precision_;
  std::unique_ptr<kernels::Backend> backend_;
  int64_t pages_ = 0;
  int64_t stride_ = 0;
  int32_t pos_ = 0;
  uint8_t* pool_ = nullptr;
  int32_t* table_ = nullptr;
  uint8_t* staging_ = nullptr;
  std::vector<AppendRow> appends_;
  std::vector<DecodeRow> rows_;
  double calls_us_ = 0.0;
};

double Quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1))];
}

double RelativeL2(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0.0;
  double size = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
    size += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(difference / size);
}

class Json {
 public:
  void Add(const std::string& line) { lines_ += (lines_.empty() ? "  " : ",\n  ") + line; }
  bool Write(const std::string& path) const {
    std::FILE* const file = std::fopen(path.c_str(), "w");
    if (file == nullptr) return false;
    std::fprintf(file, "{\n%s\n}\n", lines_.c_str());
    return std::fclose(file) == 0;
  }

 private:
  std::string lines_;
};

std::string Format(const char* format, auto... values) {
  char text[512];
  std::snprintf(text, sizeof(text), format, values...);
  return text;
}

struct Cell {
  int32_t items;
  int32_t messages;
  bool append;
};

std::string Latency(Steps& steps, const Way& way, const Cell& cell, Precision precision,
                    std::vector<float>* first) {
  constexpr int32_t kWarm = 50;
  constexpr int32_t kTimes = 1000;
  std::vector<double> times;
  std::vector<double> calls;
  for (int32_t i = -kWarm; i < kTimes; ++i) {
    if (i == 0) steps.SpoilResults();
    const Clock::time_point start = Clock::now();
    steps.Wait(steps.Queue(cell.items, cell.messages, cell.append, 0));
    if (i < 0) continue;
    times.push_back(UsSince(start));
    calls.push_back(steps.calls_us());
  }
  const std::vector<float> results = steps.Results();
  if (first->empty()) *first = results;
  const double error = RelativeL2(results, *first);
  if (!(error <= 3e-3)) {
    std::fprintf(stderr, "%s: results differ from the first way's by %g\n", way.name, error);
    std::exit(1);  // NOLINT(concurrency-mt-unsafe): one thread
  }
  const char* const of = precision == Precision::kFp8Kv ? "fp8_kv" : "bf16";
  std::printf("%4d in %3d %-7s %-6s %-38s p50 %7.2f p99 %7.2f calls %6.2f us\n", cell.items,
              cell.messages, cell.append ? "" : "no app.", of, way.name, Quantile(times, 0.5),
              Quantile(times, 0.99), Quantile(calls, 0.5));
  std::fflush(stdout);
  return Format(R"({"items": %d, "messages": %d, "append": %s, "precision": "%s", "way": "%s", )"
                R"("us_p50": %.2f, "us_p99": %.2f, "calls_us_p50": %.2f})",
                cell.items, cell.messages, cell.append ? "true" : "false", of, way.name,
                Quantile(times, 0.5), Quantile(times, 0.99), Quantile(calls, 0.5));
}

// Time of a step with others queued behind it, all the time.
double StreamUs(Steps& steps, int32_t items, int32_t messages) {
  constexpr int32_t kTimes = 400;
  std::array<kernels::FenceId, kSets> fences;
  Clock::time_point start = Clock::now();
  for (int32_t i = 0; i < kTimes + 20; ++i) {
    kernels::FenceId& fence = fences[i % kSets];
    if (i >= kSets) steps.Wait(fence);
    fence = steps.Queue(items, messages, true, i % kSets);
    if (i == 20) start = Clock::now();
  }
  const double us = UsSince(start) / kTimes;
  for (const kernels::FenceId fence : fences) steps.Wait(fence);
  return us;
}

std::string Bus() {
  constexpr int64_t kBytes = int64_t{64} << 20;
  void* host[2];
  void* device[2];
  cudaStream_t streams[2];
  for (int i = 0; i < 2; ++i) {
    MustCuda(cudaHostAlloc(&host[i], kBytes, cudaHostAllocDefault));
    std::memset(host[i], 1, kBytes);
    MustCuda(cudaMalloc(&device[i], kBytes));
    MustCuda(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
  }
  const auto gbps = [&](bool in, bool out) {
    std::vector<double> times;
    for (int i = 0; i < 7; ++i) {
      const Clock::time_point start = Clock::now();
      if (in) MustCuda(cudaMemcpyAsync(device[0], host[0], kBytes, cudaMemcpyDefault, streams[0]));
      if (out) MustCuda(cudaMemcpyAsync(host[1], device[1], kBytes, cudaMemcpyDefault, streams[1]));
      for (cudaStream_t stream : streams) MustCuda(cudaStreamSynchronize(stream));
      times.push_back(UsSince(start));
    }
    return static_cast<double>(kBytes) / Quantile(times, 0.5) / 1e3;
  };
  const double in = gbps(true, false);
  const double out = gbps(false, true);
  const double both = gbps(true, true);
  std::printf("bus: %.1f GB/s in, %.1f out, %.1f each way at once\n", in, out, both);
  return Format(R"("bus_gbps": {"in": %.1f, "out": %.1f, "each_at_once": %.1f})", in, out, both);
}

int Main(int argc, char** argv) {
  std::string path;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--json=", 7) != 0) {
      std::fputs("usage: fp8kv_step_bench [--json=FILE]\n", stderr);
      return 2;
    }
    path = argv[i] + 7;
  }
  Json json;
  cudaDeviceProp properties{};
  MustCuda(cudaGetDeviceProperties(&properties, 0));
  json.Add(Format(R"("device": "%s", "kv_len": 1024, "heads": "64/8", "head_dim": 128)",
                  properties.name));
  json.Add(Bus());
  const std::vector<Cell> cells = {{1, 1, true},   {1, 1, false}, {8, 1, true},   {8, 8, true},
                                   {32, 32, true}, {64, 1, true}, {64, 64, true}, {128, 1, true}};
  const std::vector<Cell> queued = {{128, 1, true}, {128, 128, true}, {256, 2, true}};
  std::string latencies;
  std::string streams;
  for (const Precision precision : {Precision::kFp8Kv, Precision::kBf16}) {
    std::vector<std::vector<float>> first(cells.size());
    for (const Way& way : Ways()) {
      // bf16: the default alone, and the first way to compare it with.
      const bool is_needed = std::strcmp(way.name, "default") == 0 || first[0].empty();
      if (precision == Precision::kBf16 && !is_needed) continue;
      Steps steps(way, precision, 1024);
      for (size_t i = 0; i < cells.size(); ++i) {
        latencies += (latencies.empty() ? "\n    " : ",\n    ") +
                     Latency(steps, way, cells[i], precision, &first[i]);
      }
    }
    for (const Way& way : Ways()) {
      if (precision == Precision::kBf16 && std::strcmp(way.name, "default") != 0) continue;
      Steps steps(way, precision, 2048);
      for (const Cell& cell : queued) {
        const double us = StreamUs(steps, cell.items, cell.messages);
        std::printf("stream of %d x 2048 in %3d, %-38s %7.1f us a step\n", cell.items,
                    cell.messages, way.name, us);
        streams += (streams.empty() ? "\n    " : ",\n    ") +
                   Format(R"({"items": %d, "kv_len": 2048, "messages": %d, "precision": "%s", )"
                          R"("way": "%s", "us": %.1f})",
                          cell.items, cell.messages,
                          precision == Precision::kFp8Kv ? "fp8_kv" : "bf16", way.name, us);
      }
    }
  }
  json.Add(R"("latency": [)" + latencies + "]");
  json.Add(R"("stream": [)" + streams + "]");
  if (!path.empty() && !json.Write(path)) {
    std::fprintf(stderr, "cannot write %s\n", path.c_str());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace fp8kvd::bench

int main(int argc, char** argv) { return fp8kvd::bench::Main(argc, argv); }
