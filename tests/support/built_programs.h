// tests/support/built_programs.h: what a test of the built programs starts, and on which device.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

namespace fp8kvd {

// A program that stands beside this test's own.
inline std::string BuiltProgram(const std::string& name) {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / name;
}

// Where the daemons of end-to-end tests serve: on the CPU, or on what FP8KVD_TEST_DEVICE says, as
// tests/gpu/run does.
inline std::string DeviceUnderTest() {
  const char* const named = std::getenv("FP8KVD_TEST_DEVICE");  // NOLINT(concurrency-mt-unsafe)
  return named == nullptr ? "cpu" : named;
}

}  // namespace fp8kvd
