// server/shm/door.h: the thread that takes connections of the unix socket: hears their ticket,
// makes their memory, and hands the session to the loop that has the fewest.
//
// Promises: a stranger who says nothing is sent away after kHelloMs; at most kGuestsMax are
//   heard at a time, others wait in the socket's backlog. Nothing is held for one before its
//   ticket is good.
// Threads: its own, from Open to Close.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "proto/fp8kvd/v1/shared_memory.h"
#include "server/shm/loop.h"
#include "server/shm/socket_file.h"
#include "server/shm/tickets.h"

namespace fp8kvd::shm {

class Door {
 public:
  static constexpr int64_t kHelloMs = 5000;
  static constexpr size_t kGuestsMax = 32;

  struct Limits {
    uint64_t session_bytes_max = 0;
    uint32_t entries = 256;
  };

  Door(const Limits& limits, TicketBook* tickets, Quota* quota,
       std::vector<std::unique_ptr<Loop>>* loops, const engine::Clock* clock);
  ~Door();  // after Close
  Door(const Door&) = delete;
  Door& operator=(const Door&) = delete;

  void Open(std::unique_ptr<SocketFile> file);
  void Close();  // the file goes, guests are sent away

 private:
  struct Guest {
    int socket = -1;
    int64_t until_us = 0;
  };

  void Run();
  void Accept(int64_t now_us);
  void Hear(int socket);  // takes the socket over
  absl::Status Admit(const Hello& hello, int socket);

  const Limits limits_;
  TicketBook* const tickets_;
  Quota* const quota_;
  std::vector<std::unique_ptr<Loop>>* const loops_;
  const engine::Clock* const clock_;
  const int bell_;
  std::unique_ptr<SocketFile> file_;
  std::vector<Guest> guests_;
  int64_t accepts_from_us_ = 0;  // not before: there was no descriptor for a guest
  std::thread thread_;
};

}  // namespace fp8kvd::shm
