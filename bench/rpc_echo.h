// bench/rpc_echo.h: the floor of rpc_bench: a completion-queue server that takes messages as bytes
// and answers each with prepared bytes of the size that the daemon's reply would have. No parse, no
// copy, one poller thread per queue, like the daemon's.
#pragma once

#include <functional>

namespace fp8kvd::bench {

// Serves on a free port of the loopback, hands the port to until_stopped and ends when that
// returns.
void ServeEcho(int pollers, const std::function<void(int port)>& until_stopped);

}  // namespace fp8kvd::bench
