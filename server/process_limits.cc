#include "server/process_limits.h"

#include <sys/resource.h>

#include <cstdint>
#include <fstream>

#include "absl/strings/str_cat.h"

namespace fp8kvd {
namespace {

std::string LimitText(rlim_t limit, const char* unit) {
  if (limit == RLIM_INFINITY) return "no limit";
  return absl::StrCat(static_cast<uint64_t>(limit), unit);
}

// The first line of a file of ours in /proc, "?" if there is none.
std::string FirstLine(const char* path) {
  std::ifstream file(path);
  std::string line;
  return std::getline(file, line) ? line : "?";
}

}  // namespace

std::string SetProcessLimits() {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    getrlimit(RLIMIT_NOFILE, &files);
  }
  rlimit core{};
  getrlimit(RLIMIT_CORE, &core);
  return absl::StrCat("limits: ", LimitText(files.rlim_cur, " open files"), ", core files ",
                      core.rlim_cur == 0 ? "off" : LimitText(core.rlim_cur, " bytes"),
                      ", oom_score_adj ", FirstLine("/proc/self/oom_score_adj"));
}

}  // namespace fp8kvd
