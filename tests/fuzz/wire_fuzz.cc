// The wire reader against protobuf's own parse: they accept the same bytes and read the same
// values, wherever the slices are cut. The first byte chooses the message and how it is cut.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "google/protobuf/stubs/logging.h"

#include "tests/fuzz/wire_agrees.h"

namespace {
using fp8kvd::translate::Disagreement;
using fp8kvd::translate::WireAppend;
using fp8kvd::translate::WireDecode;
}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static google::protobuf::LogSilencer* const silencer = new google::protobuf::LogSilencer;
  static_cast<void>(silencer);
  if (size == 0) return 0;
  const uint8_t choice = data[0];
  const absl::Span<const uint8_t> bytes(data + 1, size - 1);
  const std::vector<size_t> sizes = {choice % 3U, 1U + choice % 5U, 7U + choice % 16U};
  const std::string difference =
      choice & 0x80 ? Disagreement<WireAppend, fp8kvd::v1::AppendRequest>(bytes, sizes)
                    : Disagreement<WireDecode, fp8kvd::v1::DecodeRequest>(bytes, sizes);
  if (!difference.empty()) {
    std::fprintf(stderr, "wire reader and protobuf disagree: %s\n", difference.c_str());
    std::abort();
  }
  return 0;
}
