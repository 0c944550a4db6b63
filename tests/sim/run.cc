// sim_run --seeds=N [--first=S]   runs seeds S .. S + N - 1, prints what they covered
// sim_run --seed=S                replays one seed with its trace
// Exit status: 0 if all held; 1 with the first complaint of each seed that failed; 2 usage.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "tests/sim/world.h"

namespace fp8kvd::testing {
namespace {

// What a run of many seeds must have met, or it proves less than it says.
constexpr const char* kMustCover[] = {"item ALREADY_EXISTS",
                                      "item CANCELLED",
                                      "item DEADLINE_EXCEEDED",
                                      "item NOT_FOUND",
                                      "item OUT_OF_RANGE",
                                      "item FAILED_PRECONDITION",
                                      "item RESOURCE_EXHAUSTED",
                                      "answer UNAVAILABLE",
                                      "answered within Submit",
                                      "refused RESOURCE_EXHAUSTED",
                                      "device fault",
                                      "decode on two devices",
                                      "refused by one device",
                                      "drain",
                                      "killed client",
                                      "lease expiry",
                                      "page copy",
                                      "rows brought before they are appended",
                                      "replay",
                                      "fork",
                                      "control FAILED_PRECONDITION"};
constexpr int64_t kManySeeds = 200;

int RunOne(uint64_t seed) {
  World world(seed, /*is_tracing=*/true);
  const std::string complaint = world.Run();
  std::printf("%s\n", complaint.empty() ? "all held" : complaint.c_str());
  return complaint.empty() ? 0 : 1;
}

int RunMany(uint64_t first, int64_t seeds) {
  std::map<std::string, int64_t> tally;
  int64_t failed = 0;
  for (int64_t i = 0; i < seeds; ++i) {
    World world(first + static_cast<uint64_t>(i), /*is_tracing=*/false);
    if (const std::string complaint = world.Run(); !complaint.empty()) {
      std::printf("%s\n", complaint.c_str());
      ++failed;
    }
    for (const auto& [what, times] : world.tally()) tally[what] += times;
  }
  for (const auto& [what, times] : tally) {
    std::printf("%10lld  %s\n", static_cast<long long>(times), what.c_str());
  }
  for (const char* what : kMustCover) {
    if (seeds >= kManySeeds && tally[what] == 0) {
      std::printf("never happened: %s\n", what);
      ++failed;
    }
  }
  std::printf("%lld seeds, %lld failed\n", static_cast<long long>(seeds),
              static_cast<long long>(failed));
  return failed == 0 ? 0 : 1;
}

bool Read(const std::string& argument, const std::string& flag, int64_t* value) {
  if (argument.rfind(flag, 0) != 0) return false;
  *value = std::strtoll(argument.c_str() + flag.size(), nullptr, 10);
  return true;
}

}  // namespace
}  // namespace fp8kvd::testing

int main(int argc, char** argv) {
  int64_t seeds = 0;
  int64_t first = 1;
  int64_t seed = -1;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (fp8kvd::testing::Read(argument, "--seeds=", &seeds)) continue;
    if (fp8kvd::testing::Read(argument, "--first=", &first)) continue;
    if (fp8kvd::testing::Read(argument, "--seed=", &seed)) continue;
    std::fprintf(stderr, "usage: sim_run --seeds=N [--first=S] | --seed=S\n");
    return 2;
  }
  if (seed >= 0) return fp8kvd::testing::RunOne(static_cast<uint64_t>(seed));
  return fp8kvd::testing::RunMany(static_cast<uint64_t>(first), seeds);
}
