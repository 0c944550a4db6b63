// bench/kernel_bench_cpu.cc: what one decode launch takes on the processor, for fp8_kv, bf16 and
// bf16 of subnormal rows, with one thread and with several. The variants of a shape take turns
// launch by launch, so that what else the machine does meets them alike. Threads are awake when a
// launch begins, as they are in a busy daemon. Every variant's answer is checked against the
// double-precision reference before it is timed.
//
//   kernel_bench_cpu [--rounds=N] [--threads=1,2] [--shape=NAME] [--json]
//
// Exit status: 0 measured, 1 an answer was wrong, 2 bad arguments.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cpu/backend.h"
#include "server/engine/worker_pool.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/judge.h"
#include "tests/kernels/repeating_device.h"
#include "tests/kernels/run_case.h"

namespace fp8kvd::kernels::cpu {
namespace {

using cases::Case;
using cases::Data;

struct Shape {
  const char* name;
  int32_t rows;
  int32_t seq_len;
  int32_t kv_heads;
  int32_t group;
  int32_t head_dim;
};

// The first is the one that goals are set for.
constexpr Shape kShapes[] = {
    {"1x8192_32/8_d128", 1, 8192, 8, 4, 128}, {"1x2048_32/8_d128", 1, 2048, 8, 4, 128},
    {"1x8192_64/8_d128", 1, 8192, 8, 8, 128}, {"1x8192_16/2_d64", 1, 8192, 2, 8, 64},
    {"1x8192_8/4_d256", 1, 8192, 4, 2, 256},  {"32x512_32/8_d128", 32, 512, 8, 4, 128},
    {"1x77_32/8_d128", 1, 77, 8, 4, 128}};

struct Variant {
  const char* name;
  Precision precision;
  Data data;
};

constexpr Variant kVariants[] = {{"fp8_kv", Precision::kFp8Kv, Data::kNormal},
                                 {"bf16", Precision::kBf16, Data::kNormal},
                                 {"bf16_subnormal", Precision::kBf16, Data::kSubnormalRows}};

struct Options {
  int32_t rounds = 31;
  std::vector<int32_t> threads = {1, 2};
  std::string shape;  // empty: all
  bool json = false;
};

Case CaseOf(const Shape& shape, const Variant& variant) {
  Case c;
  c.name = std::string(shape.name) + " " + variant.name;
  for (int32_t i = 0; i < shape.rows; ++i) {
    cases::Row row;
    row.seq_len = shape.seq_len;
    row.pos = shape.seq_len - 1;
    row.kv_heads = shape.kv_heads;
    c.rows.push_back(row);
  }
  c.head_dim = shape.head_dim;
  c.group = shape.group;
  c.precision = variant.precision;
  c.data = variant.data;
  c.layers = 1;
  c.seed = 1;
  return c;
}

struct Result {
  std::string shape;
  std::string variant;
  int32_t threads;
  int64_t bytes;  // of K, V and scales that a launch reads
  double median_ms;
  double least_ms;
  double p90_ms;
  double relative_l2;
};

// One variant of one shape on one pool of threads, its answer checked.
class Contender {
 public:
  Contender(const Shape& shape, const Variant& variant, engine::WorkerPool& workers)
      : case_(CaseOf(shape, variant)), workers_(workers), backend_(&workers) {
    const KernelShape kernel{shape.head_dim, shape.group, variant.precision};
    FP8KVD_CHECK(backend_.WarmUp({&kernel, 1}, shape.rows, 1, shape.kv_heads * shape.group).ok());
    cases::BackendDevice::Sizes sizes;
    bytes_ = KvBytesPerToken(variant.precision, shape.head_dim) * shape.seq_len * shape.kv_heads *
             shape.rows;
    sizes.pool_bytes = 2 * bytes_ + (int64_t{64} << 20);
    sizes.staging_bytes = int64_t{1} << 30;
    device_ = std::make_unique<cases::RepeatingDevice>(backend_, sizes);
  }

  // Empty when the answer is right.
  std::string Check(const std::vector<cases::RowData>& data, const reference::DecodeOutput& right) {
    cases::Answer answer;
    const std::string error = cases::Launch(*device_, case_, data, cases::Unseen::kTokens, &answer);
    if (!error.empty()) return error;
    const cases::Verdict verdict = cases::Judge(answer, right, case_.out_type);
    relative_l2_ = verdict.relative_l2;
    return verdict.why;
  }

  void TimeOnce() {
    workers_.Run([](void*, int32_t) {}, nullptr);  // wakes them
    times_ms_.push_back(device_->AgainMs());
  }

  Result Report(const Shape& shape, const Variant& variant, int32_t threads) {
    std::sort(times_ms_.begin(), times_ms_.end());
    return {shape.name,
            variant.name,
            threads,
            bytes_,
            times_ms_[times_ms_.size() / 2],
            times_ms_.front(),
            times_ms_[times_ms_.size() * 9 / 10],
            relative_l2_};
  }

 private:
  const Case case_;
  engine::WorkerPool& workers_;
  CpuBackend backend_;
  std::unique_ptr<cases::RepeatingDevice> device_;
  std::vector<double> times_ms_;
  int64_t bytes_ = 0;
  double relative_l2_ = 0.0;
};

// All variants of a shape on all numbers of threads, in turns.
bool MeasureShape(const Shape& shape, const Options& options, std::vector<Result>& results) {
  std::vector<std::unique_ptr<engine::WorkerPool>> pools;
  std::vector<std::unique_ptr<Contender>> contenders;
  for (const int32_t threads : options.threads) {
    pools.push_back(std::make_unique<engine::WorkerPool>(threads));
  }
  for (const Variant& variant : kVariants) {
    const Case c = CaseOf(shape, variant);
    const std::vector<cases::RowData> data = cases::MakeData(c);
    const reference::DecodeOutput right = cases::Right(c, data, cases::Broken::kNone);
    for (const auto& pool : pools) {
      contenders.push_back(std::make_unique<Contender>(shape, variant, *pool));
      const std::string error = contenders.back()->Check(data, right);
      if (error.empty()) continue;
      std::fprintf(stderr, "%s: wrong answer: %s\n", c.name.c_str(), error.c_str());
      return false;
    }
  }
  for (int32_t round = 0; round < options.rounds; ++round) {
    for (const auto& contender : contenders) contender->TimeOnce();
  }
  size_t next = 0;
  for (const Variant& variant : kVariants) {
    for (const int32_t threads : options.threads) {
      results.push_back(contenders[next++]->Report(shape, variant, threads));
    }
  }
  return true;
}

void PrintTable(const std::vector<Result>& results) {
  std::printf("%-18s %-15s %7s %10s %10s %10s %8s %12s\n", "shape", "variant", "threads",
              "median_ms", "least_ms", "p90_ms", "GB/s", "relative_l2");
  for (const Result& result : results) {
    std::printf("%-18s %-15s %7d %10.3f %10.3f %10.3f %8.1f %12.2e\n", result.shape.c_str(),
                result.variant.c_str(), result.threads, result.median_ms, result.least_ms,
                result.p90_ms, static_cast<double>(result.bytes) / result.median_ms * 1e-6,
                result.relative_l2);
  }
}

void PrintJson(const std::string& device, const std::vector<Result>& results) {
  std::printf("{\"device\": \"%s\", \"results\": [", device.c_str());
  for (size_t i = 0; i < results.size(); ++i) {
    const Result& result = results[i];
    std::printf(
        "%s\n  {\"shape\": \"%s\", \"variant\": \"%s\", \"threads\": %d, \"bytes\": %lld, "
        "\"median_ms\": %.4f, \"least_ms\": %.4f, \"p90_ms\": %.4f, \"relative_l2\": %.3e}",
        i == 0 ? "" : ",", result.shape.c_str(), result.variant.c_str(), result.threads,
        static_cast<long long>(result.bytes), result.median_ms, result.least_ms, result.p90_ms,
        result.relative_l2);
  }
  std::printf("\n]}\n");
}

bool ParseOptions(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--json") {
      options.json = true;
    } else if (argument.rfind("--rounds=", 0) == 0) {
      options.rounds = static_cast<int32_t>(std::strtol(argument.c_str() + 9, nullptr, 10));
    } else if (argument.rfind("--shape=", 0) == 0) {
      options.shape = argument.substr(8);
    } else if (argument.rfind("--threads=", 0) == 0) {
      options.threads.clear();
      for (const char* at = argument.c_str() + 10; *at != '\0';) {
        char* end = nullptr;
        options.threads.push_back(static_cast<int32_t>(std::strtol(at, &end, 10)));
        if (end == at) return false;
        at = *end == ',' ? end + 1 : end;
      }
    } else {
      return false;
    }
  }
  const auto bad = [](int32_t threads) { return threads < 1 || threads > 256; };
  return options.rounds >= 1 && options.rounds <= 100000 && !options.threads.empty() &&
         std::none_of(options.threads.begin(), options.threads.end(), bad);
}

int Main(int argc, char** argv) {
  Options options;
  if (!ParseOptions(argc, argv, options)) {
    std::fprintf(stderr, "usage: %s [--rounds=N] [--threads=1,2] [--shape=NAME] [--json]\n",
                 argv[0]);
    return 2;
  }
  std::vector<Result> results;
  for (const Shape& shape : kShapes) {
    if (!options.shape.empty() && options.shape != shape.name) continue;
    if (!MeasureShape(shape, options, results)) return 1;
  }
  engine::WorkerPool workers(1);
  if (options.json) {
    PrintJson(CpuBackend(&workers).Device().name, results);
  } else {
    std::printf("%s\n", CpuBackend(&workers).Device().name.c_str());
    PrintTable(results);
  }
  return 0;
}

}  // namespace
}  // namespace fp8kvd::kernels::cpu

int main(int argc, char** argv) { return fp8kvd::kernels::cpu::Main(argc, argv); }
