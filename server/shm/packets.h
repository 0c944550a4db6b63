// server/shm/packets.h: the packets of the unix socket that the server sends (shared_memory.h).
// Neither waits: a client that does not read misses them, and its hang-up says the rest.
#pragma once

#include "absl/status/status.h"

#include "proto/fp8kvd/v1/shared_memory.h"

namespace fp8kvd::shm {

void SendFarewell(int socket, const absl::Status& reason);

// With the descriptor of the memory. False where it cannot be sent.
bool SendWelcome(int socket, const Welcome& welcome, int memory_fd);

}  // namespace fp8kvd::shm
