#include "client/cc/ctl/files.h"

#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace fp8kvd::ctl {

absl::StatusOr<std::string> ReadFile(const std::string& path, uint64_t bytes_max) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) {
    return absl::NotFoundError(absl::StrCat("no file ", path, "; check the path"));
  }
  const uint64_t bytes = std::filesystem::is_regular_file(path, error)
                             ? std::filesystem::file_size(path, error)
                             : bytes_max + 1;
  if (error || bytes > bytes_max) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file of at most ",
                                                   bytes_max, " bytes; give another"));
  }
  std::string content(bytes, '\0');
  std::ifstream in(path, std::ios::binary);
  if (!in.read(content.data(), static_cast<std::streamsize>(bytes))) {
    return absl::NotFoundError(absl::StrCat("cannot read ", path, "; check its permissions"));
  }
  return content;
}

}  // namespace fp8kvd::ctl
