// The store's operations, chosen by the fuzzer's bytes, against the model and the audit of
// tests/support/store_driver.h: what no byte string of a client may break.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/support/store_driver.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  size_t at = 0;
  // A choice takes a byte; when the bytes end, the run ends after the operation that it is in.
  fp8kvd::cache::StoreDriver driver([&](uint32_t bound) {
    const uint8_t byte = at < size ? data[at] : uint8_t{0};
    ++at;
    return byte % bound;
  });
  while (at < size) {
    const std::string fault = driver.Step();
    if (fault.empty()) continue;
    std::fprintf(stderr, "the store and its model disagree: %s\n", fault.c_str());
    std::abort();
  }
  return 0;
}
