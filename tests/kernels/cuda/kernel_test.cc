// fp8kv_kernel_test: runs the shared table of decode cases and the GPU's own checks on a CUDA
// device. Stands alone: needs a driver and nothing else. Exit code 0 when all holds.
#include <atomic>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "config/base/limits.h"
#include "kernels/cuda/backend.h"
#include "tests/kernels/backend_device.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/cuda/gpu_checks.h"
#include "tests/kernels/run_case.h"

namespace fp8kvd::kernels::cuda {
namespace {

constexpr const char* kUsage =
    "usage: fp8kv_kernel_test [--short] [--few] [--generic] [--one_warpgroup] [--verbose] "
    "[--filter=TEXT] [--part=I/N] [--path=PATH]\n"
    "  --short    the small cases of each kind, for sanitizers\n"
    "  --few      one launch of each case, no checks of many or large ones: for sanitizers that\n"
    "             record each access\n"
    "  --generic  the kernels for sm_80 and up, on any device\n"
    "  --one_warpgroup  one a CTA, for racecheck (docs/performance.md, Sanitizers)\n"
    "  --verbose  prints the relative L2 error of each case\n"
    "  --filter   only cases and checks whose names contain TEXT\n"
    "  --part     only every N-th of these, from the I-th on (0 <= I < N)\n"
    "  --path     how bytes cross the bus (step_path.h), whatever their number: near, fetch,\n"
    "             copied\n";

struct Flags {
  bool is_short = false;
  bool few = false;
  bool generic = false;
  bool one_warpgroup = false;
  bool verbose = false;
  std::string filter;
  int part = 0;
  int parts = 1;
  StepLimits step;
};

// Chooses by name, and of those every `parts`-th, in the order asked.
class Choice {
 public:
  explicit Choice(const Flags& flags) : flags_(flags) {}
  bool Takes(const std::string& name) {
    if (name.find(flags_.filter) == std::string::npos) return false;
    return asked_++ % flags_.parts == flags_.part;
  }

 private:
  const Flags& flags_;
  int asked_ = 0;
};

bool ParsePath(const std::string& path, StepLimits* step) {
  constexpr int64_t kAll = std::numeric_limits<int64_t>::max();
  if (path == "near") {
    step->step_rows_max = step->near_rows_max = kItemsMax;
    step->copy_bytes_min = kAll;
  } else if (path == "fetch") {
    step->step_rows_max = step->near_rows_max = 0;
    step->copy_bytes_min = kAll;
  } else if (path == "copied") {
    step->step_rows_max = step->near_rows_max = 0;
    step->copy_bytes_min = step->out_copy_bytes_min = 0;
  } else {
    return false;
  }
  return true;
}

bool ParsePart(const std::string& text, Flags* flags) {
  const char* const end = text.data() + text.size();
  const auto part = std::from_chars(text.data(), end, flags->part);
  if (part.ec != std::errc() || part.ptr == end || *part.ptr != '/') return false;
  const auto parts = std::from_chars(part.ptr + 1, end, flags->parts);
  return parts.ec == std::errc() && parts.ptr == end && flags->part >= 0 &&
         flags->part < flags->parts;
}

bool ParseFlags(int argc, char** argv, Flags* flags) {
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--short") {
      flags->is_short = true;
    } else if (arg == "--few") {
      flags->few = true;
    } else if (arg == "--generic") {
      flags->generic = true;
    } else if (arg == "--one_warpgroup") {
      flags->one_warpgroup = true;
    } else if (arg == "--verbose") {
      flags->verbose = true;
    } else if (arg.rfind("--filter=", 0) == 0) {
      flags->filter = arg.substr(std::strlen("--filter="));
    } else if (arg.rfind("--part=", 0) == 0) {
      if (!ParsePart(arg.substr(std::strlen("--part=")), flags)) return false;
    } else if (arg.rfind("--path=", 0) == 0) {
      if (!ParsePath(arg.substr(std::strlen("--path=")), &flags->step)) return false;
    } else {
      return false;
    }
  }
  return true;
}

// What the device answered to a case, waiting to be judged.
struct Run {
  cases::Case c;
  std::vector<cases::RowData> data;
  cases::Answer answer;
  cases::Answer with_unseen_tokens;
  int launches = 1;  // with_unseen_tokens is of the second
  std::string error;
  double relative_l2 = 0.0;
};

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void JudgeRun(Run& run) {
  if (!run.error.empty()) return;
  const cases::Verdict verdict =
      cases::Judge(run.answer, cases::Right(run.c, run.data, cases::Broken::kNone), run.c.out_type);
  run.error = verdict.why;
  run.relative_l2 = verdict.relative_l2;
  if (run.launches == 1) return;
  if (run.error.empty() && (!SameBits(run.answer.out, run.with_unseen_tokens.out) ||
                            !SameBits(run.answer.lse, run.with_unseen_tokens.lse))) {
    run.error = "the answer depends on tokens that no query sees";
  }
}

std::vector<cases::Case> ChosenCases(const Flags& flags, Choice& choice) {
  std::vector<cases::Case> chosen =
      cases::Cases(flags.is_short ? cases::Set::kShort : cases::Set::kFull);
  std::erase_if(chosen, [&](const cases::Case& c) { return !choice.Takes(c.name); });
  return chosen;
}

// The device runs all cases first; the reference follows on all cores.
std::vector<Run> RunCases(cases::BackendDevice& device, const Flags& flags,
                          const std::vector<cases::Case>& chosen) {
  std::vector<Run> runs;
  for (const cases::Case& c : chosen) {
    Run run;
    run.c = c;
    run.data = cases::MakeData(c);
    run.error = cases::Launch(device, c, run.data, cases::Unseen::kPoison, &run.answer);
    if (run.error.empty() && !flags.few) {
      run.error =
          cases::Launch(device, c, run.data, cases::Unseen::kTokens, &run.with_unseen_tokens);
      run.launches = 2;
    }
    runs.push_back(std::move(run));
  }
  std::atomic<size_t> next{0};
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::thread::hardware_concurrency(); ++i) {
    threads.emplace_back([&] {
      for (size_t at = next++; at < runs.size(); at = next++) JudgeRun(runs[at]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return runs;
}

// All kernels; with --few those of the cases and of the checks, since sanitizers take long to load
// and to run each.
absl::Status WarmUp(Backend& backend, const std::vector<cases::Case>& chosen, bool few) {
  constexpr int32_t kGroupOfChecks = 8;
  std::vector<KernelShape> shapes;
  for (const cases::Case& c : chosen) shapes.push_back({c.head_dim, c.group, c.precision});
  for (const Precision precision : {Precision::kFp8Kv, Precision::kBf16}) {
    for (const int32_t head_dim : kHeadDims) {
      for (int32_t group = 1; group <= kGroupMax; ++group) {
        if (!few || group == kGroupOfChecks) shapes.push_back({head_dim, group, precision});
      }
    }
  }
  return backend.WarmUp(shapes, kItemsMax, kQLenMax, /*q_heads_max=*/256);
}

class Report {
 public:
  void Add(const std::string& name, const std::string& error) {
    ++(error.empty() ? passed_ : failed_);
    if (!error.empty()) std::printf("FAILED %s: %s\n", name.c_str(), error.c_str());
  }
  int Close() const {
    std::printf("%d passed, %d failed\n", passed_, failed_);
    return failed_ == 0 && passed_ > 0 ? 0 : 1;
  }

 private:
  int passed_ = 0;
  int failed_ = 0;
};

int Main(int argc, char** argv) {
  Flags flags;
  if (!ParseFlags(argc, argv, &flags)) {
    std::fputs(kUsage, stderr);
    return 2;
  }
  CudaOptions options;
  options.generic_kernels = flags.generic;
  options.one_warpgroup = flags.one_warpgroup;
  options.step = flags.step;
  auto backend = MakeCudaBackend(options);
  if (!backend.ok()) {
    std::fprintf(stderr, "%s\n", backend.status().ToString().c_str());
    return 2;
  }
  std::printf("%s\n", (*backend)->Device().name.c_str());
  Choice choice(flags);
  const std::vector<cases::Case> chosen = ChosenCases(flags, choice);
  const absl::Status warm = WarmUp(**backend, chosen, flags.few);
  if (!warm.ok()) {
    std::fprintf(stderr, "%s\n", warm.ToString().c_str());
    return 2;
  }
  cases::BackendDevice::Sizes sizes;
  if (flags.is_short) sizes = {int64_t{512} << 20, 1 << 20, int64_t{256} << 20};
  cases::BackendDevice device(**backend, sizes);

  Report report;
  for (const Run& run : RunCases(device, flags, chosen)) {
    if (flags.verbose) std::printf("%s: relative L2 %.6f\n", run.c.name.c_str(), run.relative_l2);
    report.Add(run.c.name, run.error);
  }
  for (const Check& check : GpuChecks()) {
    if ((flags.few && check.is_long) || !choice.Takes(check.name)) continue;
    report.Add(check.name, check.run(**backend, device));
  }
  constexpr const char* kBroken = "broken_scales_fail";
  if (choice.Takes(kBroken)) report.Add(kBroken, cases::CheckThatBrokenScalesFail());
  return report.Close();
}

}  // namespace
}  // namespace fp8kvd::kernels::cuda

int main(int argc, char** argv) { return fp8kvd::kernels::cuda::Main(argc, argv); }
