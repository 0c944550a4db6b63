// The ring reader against a client that writes anything at any time. The input is a program: each
// step sets an index, writes an entry, or lets the server look.
#include <cstdint>
#include <cstring>
#include <memory>

#include "config/base/check.h"
#include "server/shm/memory.h"
#include "server/shm/ring.h"

namespace fp8kvd::shm {
namespace {

constexpr uint32_t kEntries = 8;

class Program {
 public:
  Program(const uint8_t* data, size_t size) : data_(data), left_(size) {}
  template <typename T>
  T Next() {
    T value{};
    const size_t size = left_ < sizeof(T) ? left_ : sizeof(T);
    std::memcpy(&value, data_, size);
    data_ += size;
    left_ -= size;
    return value;
  }
  bool is_over() const { return left_ == 0; }

 private:
  const uint8_t* data_;
  size_t left_;
};

void CheckInside(uint64_t at, uint64_t bytes, const Ring& ring, const Memory& memory) {
  const uint64_t data_bytes = memory.layout().data_bytes;
  FP8KVD_CHECK(bytes <= data_bytes && at <= data_bytes - bytes);
  volatile uint8_t sum = 0;  // touches both ends, under the sanitizer's eyes
  if (bytes > 0) sum = static_cast<uint8_t>(ring.Data(at)[0] + ring.Data(at)[bytes - 1]);
  static_cast<void>(sum);
}

// The server's turn: takes all it may. False when the ring said that the client lied.
bool Serve(Ring* ring, const Memory& memory, uint8_t answers_max) {
  uint32_t taken = 0;
  for (;;) {
    Request request;
    const absl::StatusOr<bool> was_taken = ring->Take(&request);
    if (!was_taken.ok()) {
      FP8KVD_CHECK(absl::IsInvalidArgument(was_taken.status()));
      return false;
    }
    if (!*was_taken) break;
    FP8KVD_CHECK(++taken <= kEntries);
    FP8KVD_CHECK(request.head_bytes <= kHeadBytesMax);
    CheckInside(request.head_at, request.head_bytes, *ring, memory);
    CheckInside(request.q_at, request.q_bytes, *ring, memory);
    CheckInside(request.k_at, request.k_bytes, *ring, memory);
    CheckInside(request.v_at, request.v_bytes, *ring, memory);
    CheckInside(request.reply_at, request.reply_bytes, *ring, memory);
  }
  FP8KVD_CHECK(ring->inflight() <= kEntries);
  for (uint8_t i = 0; i < answers_max && ring->inflight() > 0; ++i) ring->Put({.tag = i});
  ring->Publish();
  ring->Sleep();
  ring->Wake();
  return true;
}

void Run(Program program) {
  static const std::unique_ptr<Memory> memory = Memory::Make(kEntries, 4096).value();
  std::memset(memory->bytes(), 0, memory->layout().memory_bytes);
  Ring ring(memory->layout(), memory->bytes());
  auto* const head = reinterpret_cast<Head*>(memory->bytes());
  auto* const requests = reinterpret_cast<Request*>(memory->bytes() + memory->layout().requests_at);
  Line* const lines[] = {&head->requests_tail, &head->requests_head, &head->replies_tail,
                         &head->replies_head,  &head->server_sleeps, &head->client_sleeps};
  while (!program.is_over()) {
    const auto step = program.Next<uint8_t>();
    switch (step % 5) {
      case 0:
        lines[step / 5 % 6]->value = program.Next<uint32_t>();
        break;
      case 1:
        ++lines[step / 5 % 6]->value;
        break;
      case 2:
        requests[step / 5 % kEntries] = program.Next<Request>();
        break;
      case 3: {  // one that could be true
        Request& request = requests[step / 5 % kEntries];
        request = {};
        request.kind = Kind{1U + (step & 1U)};
        request.q_at = program.Next<uint16_t>();
        request.q_bytes = program.Next<uint16_t>();
        ++head->requests_tail.value;
        break;
      }
      default:
        if (!Serve(&ring, *memory, step / 5)) return;
    }
  }
}

}  // namespace
}  // namespace fp8kvd::shm

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fp8kvd::shm::Run(fp8kvd::shm::Program(data, size));
  return 0;
}
