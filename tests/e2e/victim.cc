// The client that the end-to-end tests kill: e2e_victim ADDRESS append|decode. Makes sequences with
// a lease of a second, works on them without end in large messages, and says "working" once the
// daemon has pages of it.
#include <cstdio>
#include <string>

#include "tests/e2e/client.h"

namespace fp8kvd::testing {
namespace {

int Append(v1::DecodeAttention::Stub* stub, const v1::Handle& handle) {
  grpc::ClientContext context;
  v1::AppendResponse response;
  auto writer = stub->Append(&context, &response);
  for (uint64_t pos = 0;; pos = (pos + 64) % 960) {  // later laps are refused or replays: no matter
    if (!writer->Write(ChunkOf(handle, 0, pos, 64, 0x4000))) break;
    if (pos == 128) {
      std::puts("working");
      std::fflush(stdout);
    }
    if (pos == 896) break;
  }
  for (;;) {  // the stream stays open, in the middle, until the process is killed
    grpc::ClientContext beside;
    v1::GetServerInfoResponse info;
    if (!stub->GetServerInfo(&beside, {}, &info).ok()) return 1;
  }
}

int Decode(v1::DecodeAttention::Stub* stub, const std::vector<v1::Handle>& handles) {
  grpc::ClientContext context;
  auto stream = stub->DecodeStream(&context);
  v1::DecodeResponse reply;
  for (uint64_t pos = 0; pos < 1000; ++pos) {
    for (int layer = 0; layer < kLayers; ++layer) {
      if (!stream->Write(StepOf(handles, layer, pos, 0x4000))) return 1;
    }
    if (pos >= 8 && !stream->Read(&reply)) return 1;  // many in flight
    if (pos == 100) {
      std::puts("working");
      std::fflush(stdout);
    }
  }
  while (stream->Read(&reply)) {
  }
  return 1;
}

int Main(int argc, char** argv) {
  if (argc != 3) return 2;
  const auto stub = Connect(argv[1]);
  grpc::ClientContext context;
  v1::CreateSequencesResponse created;
  if (!stub->CreateSequences(&context, CreateRequest(4, /*ttl_ms=*/1000), &created).ok()) return 1;
  if (std::string(argv[2]) == "append") return Append(stub.get(), created.handles(0));
  return Decode(stub.get(), {created.handles().begin(), created.handles().end()});
}

}  // namespace
}  // namespace fp8kvd::testing

int main(int argc, char** argv) { return fp8kvd::testing::Main(argc, argv); }
