#include "server/shm/door.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"

#include "config/base/check.h"
#include "server/shm/memory.h"
#include "server/shm/packets.h"
#include "server/shm/quota.h"
#include "server/shm/session.h"

namespace fp8kvd::shm {
namespace {

constexpr int kPollMsMax = 1000;
constexpr int kAcceptAgainMs = 100;  // after there was no descriptor for a guest
constexpr uint64_t kSessionBytesMin = uint64_t{64} << 10;

void SendAway(int socket, const absl::Status& reason) {
  SendFarewell(socket, reason);
  close(socket);
}

}  // namespace

Door::Door(const Limits& limits, TicketBook* tickets, Quota* quota,
           std::vector<std::unique_ptr<Loop>>* loops, const engine::Clock* clock)
    : limits_(limits),
      tickets_(tickets),
      quota_(quota),
      loops_(loops),
      clock_(clock),
      bell_(eventfd(0, EFD_CLOEXEC)) {
  FP8KVD_CHECK(bell_ >= 0);
}

Door::~Door() {
  FP8KVD_CHECK(!thread_.joinable());
  close(bell_);
}

void Door::Open(std::unique_ptr<SocketFile> file) {
  file_ = std::move(file);
  thread_ = std::thread([this] { Run(); });
}

void Door::Close() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  FP8KVD_CHECK(write(bell_, &one, sizeof(one)) == sizeof(one));
  thread_.join();
  for (const Guest& guest : guests_) {
    SendAway(guest.socket, absl::UnavailableError("the server drains; connect again"));
  }
  guests_.clear();
  file_.reset();
}

void Door::Run() {
  std::vector<pollfd> polled;
  for (;;) {
    polled.assign({{.fd = bell_, .events = POLLIN, .revents = 0}});
    const bool waits = clock_->NowUs() < accepts_from_us_;
    const bool has_room = guests_.size() < kGuestsMax && !waits;
    polled.push_back({.fd = has_room ? file_->fd() : -1, .events = POLLIN, .revents = 0});
    for (const Guest& guest : guests_) {
      polled.push_back({.fd = guest.socket, .events = POLLIN, .revents = 0});
    }
    const int wait_ms = waits ? kAcceptAgainMs : guests_.empty() ? -1 : kPollMsMax;
    (void)poll(polled.data(), polled.size(), wait_ms);
    if (polled[0].revents != 0) return;
    const int64_t now = clock_->NowUs();
    std::vector<Guest> silent;
    for (size_t i = 0; i < guests_.size(); ++i) {
      if (polled[i + 2].revents != 0) {
        Hear(guests_[i].socket);
      } else if (guests_[i].until_us <= now) {
        SendAway(guests_[i].socket,
                 absl::DeadlineExceededError(absl::StrCat("no ticket came within ", kHelloMs,
                                                          " ms; connect again and send one")));
      } else {
        silent.push_back(guests_[i]);
      }
    }
    guests_.swap(silent);
    if (polled[1].revents != 0) Accept(now);
  }
}

void Door::Accept(int64_t now_us) {
  const int socket = accept4(file_->fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (socket < 0) {
    // Without descriptors the guest stays at the door, and poll would say so for ever.
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
      accepts_from_us_ = now_us + int64_t{kAcceptAgainMs} * 1000;
    }
    return;
  }
  guests_.push_back({.socket = socket, .until_us = now_us + kHelloMs * 1000});
}

void Door::Hear(int socket) {
  Hello hello;
  const ssize_t got = recv(socket, &hello, sizeof(hello), MSG_DONTWAIT | MSG_TRUNC);
  absl::Status status;
  if (got != static_cast<ssize_t>(sizeof(hello)) || hello.magic != kMagic) {
    status = absl::InvalidArgumentError(absl::StrCat(
        "the first packet has ", got, " bytes, a Hello has ", sizeof(hello), "; send one"));
  } else if (hello.version != kVersion) {
    status = absl::FailedPreconditionError(absl::StrCat("the client speaks version ", hello.version,
                                                        " of the transport, this server ", kVersion,
                                                        "; use gRPC, or a client of its version"));
  } else {
    status = Admit(hello, socket);
  }
  if (!status.ok()) SendAway(socket, status);
}

absl::Status Door::Admit(const Hello& hello, int socket) {
  const absl::StatusOr<cache::TenantId> tenant =
      tickets_->Redeem(absl::string_view(hello.ticket, kTicketBytes));
  if (!tenant.ok()) return tenant.status();
  const uint64_t wanted = hello.memory_bytes == 0 ? limits_.session_bytes_max : hello.memory_bytes;
  const uint64_t data_bytes =
      std::max(kSessionBytesMin, std::min(wanted, limits_.session_bytes_max));
  absl::StatusOr<std::unique_ptr<Memory>> memory = Memory::Make(limits_.entries, data_bytes);
  if (!memory.ok()) return memory.status();
  const auto bytes = static_cast<int64_t>((*memory)->layout().memory_bytes);
  absl::Status status = quota_->Take(*tenant, bytes);
  if (!status.ok()) return status;
  if (!SendWelcome(socket, (*memory)->layout(), (*memory)->fd())) {
    quota_->GiveBack(*tenant, bytes, /*has_lied=*/false);
    return absl::UnavailableError("the client has gone");
  }
  (*memory)->CloseFd();
  Loop* const loop =
      std::min_element(loops_->begin(), loops_->end(), [](const auto& a, const auto& b) {
        return a->sessions() < b->sessions();
      })->get();
  loop->Adopt(std::make_unique<Session>(loop, *std::move(memory), socket, *tenant));
  return absl::OkStatus();
}

}  // namespace fp8kvd::shm
