#include "client/cc/shared_session.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "client/cc/convert.h"
#include "proto/fp8kvd/v1/shared_lines.h"

namespace fp8kvd::client {
namespace {

using shm::AlignUp;
using Ref = std::atomic_ref<uint32_t>;

constexpr int kWelcomeMs = 2'000;
// An AppendRequest without its tensors, and what they are rounded up by.
constexpr uint64_t kAppendHeadBytes = 1024;
// A DecodeRequest without its tensors: its name, what an item takes (a handle, a position, a
// q_len), what a sink takes, and the rest.
constexpr uint64_t kItemHeadBytes = 64;
constexpr uint64_t kSinkHeadBytes = sizeof(float);
constexpr uint64_t kDecodeHeadBytes = 128;

uint64_t DecodeHeadBytesMax(const DecodeArgs& args) {
  return kDecodeHeadBytes + args.model.size() + kItemHeadBytes * args.handles.size() +
         kSinkHeadBytes * args.sink_logits.size();
}

uint32_t Load(const shm::Line& line) { return Ref(const_cast<shm::Line&>(line).value).load(); }
void Store(shm::Line& line, uint32_t value) { Ref(line.value).store(value); }

template <typename T>
absl::Span<const uint8_t> Bytes(absl::Span<const T> elements) {
  return {reinterpret_cast<const uint8_t*>(elements.data()), elements.size() * sizeof(T)};
}

absl::Status Unreachable(const std::string& path) {
  return absl::UnavailableError(
      absl::StrCat("cannot use ", path, ": ", std::generic_category().message(errno)));
}

// Why the server sent us away; never OK.
absl::Status Said(const shm::Farewell& farewell) {
  const size_t size = strnlen(farewell.reason, sizeof(farewell.reason));
  if (farewell.code == 0) return absl::UnavailableError("the server hung up without a reason");
  return absl::Status(static_cast<absl::StatusCode>(farewell.code),
                      absl::string_view(farewell.reason, size));
}

int ConnectTo(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    errno = ENAMETOOLONG;
    return -1;
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (fd >= 0 && connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    const int error = errno;
    close(fd);
    errno = error;
    return -1;
  }
  return fd;
}

// A packet, and the descriptors that came with it, which are this process's now. The kernel closes
// those that find no room.
struct Packet {
  alignas(shm::Farewell) char bytes[sizeof(shm::Farewell)];
  ssize_t size = 0;
  std::vector<int> descriptors;

  Packet() = default;
  Packet(const Packet&) = delete;
  Packet& operator=(const Packet&) = delete;
  ~Packet() {
    for (const int descriptor : descriptors) close(descriptor);
  }
};

void Receive(int socket, Packet* packet) {
  iovec bytes = {.iov_base = packet->bytes, .iov_len = sizeof(packet->bytes)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  packet->size = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  if (packet->size < 0) return;
  for (cmsghdr* at = CMSG_FIRSTHDR(&message); at != nullptr; at = CMSG_NXTHDR(&message, at)) {
    if (at->cmsg_level != SOL_SOCKET || at->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (at->cmsg_len - CMSG_LEN(0)) / sizeof(int);  // two fit the padding
    packet->descriptors.resize(count);
    std::memcpy(packet->descriptors.data(), CMSG_DATA(at), count * sizeof(int));
  }
}

// The layout and the memory's descriptor, or why there is none.
absl::StatusOr<int> Greet(int socket, const SharedSession::Place& place, shm::Welcome* welcome) {
  shm::Hello hello;
  if (place.ticket.size() != shm::kTicketBytes) {
    return absl::InternalError("the server's ticket has another form than this client knows");
  }
  std::memcpy(hello.ticket, place.ticket.data(), shm::kTicketBytes);
  hello.memory_bytes = place.memory_bytes;
  if (send(socket, &hello, sizeof(hello), MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(hello))) {
    return Unreachable(place.unix_socket);
  }
  pollfd readable = {.fd = socket, .events = POLLIN, .revents = 0};
  if (poll(&readable, 1, kWelcomeMs) != 1) {
    return absl::UnavailableError(absl::StrCat(place.unix_socket, " did not answer in time"));
  }
  Packet packet;
  Receive(socket, &packet);
  if (packet.size == static_cast<ssize_t>(sizeof(shm::Farewell))) {
    shm::Farewell farewell;
    std::memcpy(&farewell, packet.bytes, sizeof(farewell));
    return Said(farewell);
  }
  if (packet.size != static_cast<ssize_t>(sizeof(*welcome)) || packet.descriptors.empty()) {
    return absl::UnavailableError(absl::StrCat(place.unix_socket, " hung up"));
  }
  std::memcpy(welcome, packet.bytes, sizeof(*welcome));
  const int memory = packet.descriptors.back();
  packet.descriptors.pop_back();
  return memory;
}

}  // namespace

SharedMessage DecodeMessageOf(const DecodeArgs& args, int64_t timeout_ms) {
  SharedMessage message{.kind = shm::Kind::kDecode,
                        .q = args.q,
                        .k = args.k,
                        .v = args.v,
                        .items = args.handles.size(),
                        .timeout_ms = timeout_ms,
                        .out_type = args.out_type};
  const uint64_t element_bytes = args.out_type == OutType::kFp32 ? 4 : 2;
  message.reply_bytes = AlignUp(args.q.size() * element_bytes);
  // lse has an element for each row of q, whose head_dim is 64 at least.
  if (args.want_lse) message.reply_bytes += AlignUp(args.q.size() / 64 * sizeof(float));
  return message;
}

uint64_t SharedSession::RoomFor(const SharedMessage& message) {
  uint64_t bytes = AlignUp(message.head.size());
  for (const auto tensor : {message.q, message.k, message.v}) bytes += AlignUp(tensor.size() * 2);
  return bytes +
         AlignUp(message.reply_bytes + shm::kReplyBytes + shm::kReplyBytesPerItem * message.items);
}

uint64_t SharedSession::RoomFor(const DecodeArgs& args) {
  return RoomFor(DecodeMessageOf(args, 0)) + AlignUp(DecodeHeadBytesMax(args));
}

uint64_t SharedSession::RoomFor(uint64_t append_bytes) {
  return AlignUp(append_bytes) + kAppendHeadBytes + shm::kReplyBytes + shm::kReplyBytesPerItem;
}

absl::StatusOr<std::shared_ptr<SharedSession>> SharedSession::Open(const Place& place) {
  const int socket = ConnectTo(place.unix_socket);
  if (socket < 0) return Unreachable(place.unix_socket);
  shm::Welcome layout;
  const absl::StatusOr<int> fd = Greet(socket, place, &layout);
  if (!fd.ok()) {
    close(socket);
    return fd.status();
  }
  void* const memory =
      mmap(nullptr, layout.memory_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
  close(*fd);
  if (memory == MAP_FAILED) {
    close(socket);
    return Unreachable(place.unix_socket);
  }
  return std::shared_ptr<SharedSession>(
      new SharedSession(socket, layout, static_cast<uint8_t*>(memory), place.spin_us));
}

SharedSession::SharedSession(int socket, const shm::Welcome& layout, uint8_t* memory,
                             int64_t spin_us)
    : socket_(socket),
      layout_(layout),
      memory_(memory),
      head_(reinterpret_cast<shm::Head*>(memory)),
      spin_us_(spin_us),
      arena_(layout.data_bytes) {}

SharedSession::~SharedSession() {
  close(socket_);
  munmap(memory_, layout_.memory_bytes);
}

uint32_t SharedSession::RepliesTail() const { return Load(head_->replies_tail); }

absl::StatusOr<SharedRows> SharedSession::MakeRows(std::shared_ptr<SharedSession> session,
                                                   size_t elements) {
  const uint64_t bytes = AlignUp(elements * sizeof(uint16_t));
  std::optional<uint64_t> at;
  {
    const std::lock_guard<std::mutex> lock(session->mutex_);
    at = session->arena_.Take(bytes);
  }
  if (!at.has_value()) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "MakeRows: the session has no ", bytes, " bytes left of ", session->bytes_max(),
        "; drop rows, or open the client with more shared_memory_bytes"));
  }
  uint8_t* const begin = session->memory_ + session->layout_.data_at + *at;
  const auto give_back = [session = std::move(session), at = *at, bytes](void*) {
    const std::lock_guard<std::mutex> lock(session->mutex_);
    session->arena_.GiveBack(at, bytes);
    if (session->waiters_ > 0) session->changed_.notify_all();
  };
  return SharedRows(std::shared_ptr<void>(begin, give_back),
                    {reinterpret_cast<uint16_t*>(begin), elements});
}

bool SharedSession::IsInPlace(absl::Span<const uint16_t> tensor) const {
  const auto* const begin = reinterpret_cast<const uint8_t*>(tensor.data());
  const uint8_t* const data = memory_ + layout_.data_at;
  return !tensor.empty() && std::less_equal<>()(data, begin) &&
         std::less<>()(begin, data + layout_.data_bytes);
}

uint64_t SharedSession::RoomLeftFor(const SharedMessage& message) const {
  uint64_t bytes = RoomFor(message);
  for (const auto tensor : {message.q, message.k, message.v}) {
    if (IsInPlace(tensor)) bytes -= AlignUp(tensor.size() * sizeof(uint16_t));
  }
  return bytes;
}

void SharedSession::Copy(const SharedMessage& message, uint64_t at, shm::Request* request) const {
  uint8_t* const data = memory_ + layout_.data_at;
  const auto place = [&](absl::Span<const uint8_t> bytes, uint64_t* field_at,
                         uint64_t* field_bytes) {
    *field_at = at;
    *field_bytes = bytes.size();
    if (!bytes.empty()) std::memcpy(data + at, bytes.data(), bytes.size());
    at += AlignUp(bytes.size());
  };
  place({reinterpret_cast<const uint8_t*>(message.head.data()), message.head.size()},
        &request->head_at, &request->head_bytes);
  const auto place_rows = [&](absl::Span<const uint16_t> rows, uint64_t* field_at,
                              uint64_t* field_bytes) {
    if (!IsInPlace(rows)) return place(Bytes(rows), field_at, field_bytes);
    *field_at = static_cast<uint64_t>(reinterpret_cast<const uint8_t*>(rows.data()) - data);
    *field_bytes = rows.size() * sizeof(uint16_t);
  };
  place_rows(message.q, &request->q_at, &request->q_bytes);
  place_rows(message.k, &request->k_at, &request->k_bytes);
  place_rows(message.v, &request->v_at, &request->v_bytes);
  request->reply_at = at;
}

absl::StatusOr<SharedCallPtr> SharedSession::Send(const SharedMessage& message, uint64_t id,
                                                  Time until, std::shared_ptr<SharedInbox> inbox) {
  const uint64_t bytes = RoomLeftFor(message);
  if (bytes > bytes_max() || message.head.size() > shm::kHeadBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the request and its reply take ", bytes, " bytes, ", message.head.size(),
        " without tensors, the session has ", bytes_max(), " and takes ", shm::kHeadBytesMax,
        "; send less at once, or open the client with more shared_memory_bytes"));
  }
  auto call = std::make_shared<SharedCall>();
  call->id = id;
  call->kind = message.kind;
  call->out_type = message.out_type;
  call->inbox = std::move(inbox);
  call->bytes = bytes;
  std::unique_lock<std::mutex> lock(mutex_);
  std::optional<uint64_t> at;
  const bool has_room = Await(lock, until, [&] {
    if (outstanding_ < layout_.entries) at = arena_.Take(bytes);
    return at.has_value();
  });
  if (is_broken()) {
    if (at.has_value()) arena_.GiveBack(*at, bytes);
    return broken_;
  }
  if (!has_room) {
    return absl::DeadlineExceededError("the session's memory was in use until the deadline");
  }
  call->at = *at;
  ++outstanding_;
  lock.unlock();
  shm::Request request;
  request.kind = message.kind;
  request.timeout_ms = static_cast<uint32_t>(std::clamp<int64_t>(message.timeout_ms, 0, INT32_MAX));
  Copy(message, *at, &request);
  request.reply_bytes = *at + bytes - request.reply_at;
  const auto rows = [this](uint64_t place, uint64_t size) {
    return absl::MakeConstSpan(reinterpret_cast<const uint16_t*>(memory_ + layout_.data_at + place),
                               size / sizeof(uint16_t));
  };
  call->q = rows(request.q_at, request.q_bytes);
  call->k = rows(request.k_at, request.k_bytes);
  call->v = rows(request.v_at, request.v_bytes);
  lock.lock();
  if (is_broken()) return broken_;
  request.tag = ++last_tag_;
  calls_[request.tag] = call;
  auto* const ring = reinterpret_cast<shm::Request*>(memory_ + layout_.requests_at);
  ring[requests_tail_ % layout_.entries] = request;
  Store(head_->requests_tail, ++requests_tail_);
  if (message.kind == shm::Kind::kDecode) {
    copied_ = {.bytes = memory_ + layout_.data_at + *at,
               .size = request.reply_at - *at,
               .requests_tail = requests_tail_};
  }
  if (Load(head_->server_sleeps) != 0 && Ref(head_->server_sleeps.value).exchange(0) != 0) {
    const char bell = 0;
    (void)send(socket_, &bell, sizeof(bell), MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  return call;
}

// Somebody leads: takes all replies in. The others sleep until something has changed.
template <typename Ready>
bool SharedSession::Await(std::unique_lock<std::mutex>& lock, Time until, const Ready& ready) {
  while (!ready()) {
    if (is_broken() || std::chrono::steady_clock::now() >= until) return false;
    if (has_leader_) {
      ++waiters_;
      changed_.wait_until(lock, until);
      --waiters_;
    } else {
      Lead(lock, until);
    }
  }
  return true;
}

void SharedSession::Lead(std::unique_lock<std::mutex>& lock, Time until) {
  has_leader_ = true;
  const Copied copied = std::exchange(copied_, {});
  lock.unlock();
  const bool has_replies = LookForReplies(until, copied);
  lock.lock();
  if (has_replies) TakeReplies(lock);
  if (is_broken()) BreakAll();
  has_leader_ = false;
  if (waiters_ > 0) changed_.notify_all();
}

bool SharedSession::LookForReplies(Time until, Copied copied) {
  const Time begin = std::chrono::steady_clock::now();
  const Time spin_until = std::min(until, begin + std::chrono::microseconds(spin_us_));
  shm::PassLines(copied.bytes, copied.size);
  while (RepliesTail() == replies_head_) {
    if (std::chrono::steady_clock::now() < spin_until) {
      if (copied.size > 0 && Load(head_->requests_head) == copied.requests_tail) {
        shm::OwnLines(copied.bytes, copied.size);
        copied.size = 0;
      }
      shm::Pause();
      continue;
    }
    Store(head_->client_sleeps, 1);
    const bool go_on = RepliesTail() != replies_head_ || HearSocket(until);
    Store(head_->client_sleeps, 0);
    if (!go_on) break;
  }
  return RepliesTail() != replies_head_;
}

// Sleeps until the server rings. False at the deadline, and when the session broke.
bool SharedSession::HearSocket(Time until) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
  pollfd readable = {.fd = socket_, .events = POLLIN, .revents = 0};
  const int ready =
      poll(&readable, 1, static_cast<int>(std::clamp<int64_t>(left.count(), 0, 60'000)));
  if (ready == 0) return std::chrono::steady_clock::now() < until;
  alignas(shm::Farewell) char packet[sizeof(shm::Farewell)];
  const ssize_t got = recv(socket_, packet, sizeof(packet), MSG_DONTWAIT);
  if (got == 1 || (got < 0 && (errno == EAGAIN || errno == EINTR))) return true;
  broken_ = absl::UnavailableError("the server ended the session without a word");
  if (got == static_cast<ssize_t>(sizeof(packet))) {
    shm::Farewell farewell;
    std::memcpy(&farewell, packet, sizeof(farewell));
    broken_ = absl::UnavailableError(Said(farewell).message());
  }
  is_broken_ = true;
  return false;
}

void SharedSession::TakeReplies(std::unique_lock<std::mutex>& lock) {
  // They stay in calls_ while they are read, so that Detach finds each here or in its inbox.
  std::vector<std::pair<shm::Reply, SharedCallPtr>> taken;
  const uint32_t tail = RepliesTail();
  const auto* const ring = reinterpret_cast<const shm::Reply*>(memory_ + layout_.replies_at);
  for (; replies_head_ != tail; ++replies_head_) {
    const shm::Reply reply = ring[replies_head_ % layout_.entries];
    const auto found = calls_.find(reply.tag);
    if (found == calls_.end() || std::exchange(found->second->is_read, true)) continue;
    taken.emplace_back(reply, found->second);
  }
  Store(head_->replies_head, replies_head_);
  outstanding_ -= static_cast<uint32_t>(taken.size());
  lock.unlock();
  for (const auto& [reply, call] : taken) Convert(reply, call.get());
  lock.lock();
  for (const auto& [reply, call] : taken) {
    calls_.erase(reply.tag);
    if (!call->is_detached) arena_.GiveBack(call->at, call->bytes);
    Finish(call);
  }
}

void SharedSession::Finish(const SharedCallPtr& call) {
  call->is_done = true;
  if (call->inbox != nullptr) call->inbox->push_back(call);
}

void SharedSession::BreakAll() {
  for (const auto& [tag, call] : calls_) {
    call->status = broken_;
    Finish(call);
  }
  calls_.clear();
}

void SharedSession::Convert(const shm::Reply& reply, SharedCall* call) const {
  const auto part = [this, call](uint64_t at, uint64_t bytes) -> absl::Span<const uint8_t> {
    if (bytes > call->bytes || at < call->at || at - call->at > call->bytes - bytes) return {};
    return {memory_ + layout_.data_at + at, bytes};
  };
  const absl::Span<const uint8_t> head = part(reply.head_at, reply.head_bytes);
  if (reply.code != 0) {
    call->status = ErrorFromHead(reply.code, head, &call->pushback_ms);
  } else if (call->kind == shm::Kind::kDecode) {
    absl::StatusOr<DecodeReply> decoded =
        DecodeReplyFromParts(head, part(reply.out_at, reply.out_bytes),
                             part(reply.lse_at, reply.lse_bytes), call->out_type);
    call->status = decoded.status();
    if (decoded.ok()) call->reply = *std::move(decoded);
  }
}

bool SharedSession::Wait(const SharedCallPtr& call, Time until) {
  std::unique_lock<std::mutex> lock(mutex_);
  Await(lock, until, [&] { return call->is_done; });
  return call->is_done;
}

bool SharedSession::WaitForDone(const SharedInbox& inbox, Time until) {
  std::unique_lock<std::mutex> lock(mutex_);
  return Await(lock, until, [&] { return !inbox.empty(); });
}

SharedCallPtr SharedSession::TakeDone(SharedInbox* inbox) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (inbox->empty()) return nullptr;
  SharedCallPtr call = std::move(inbox->front());
  inbox->pop_front();
  return call;
}

SharedInbox SharedSession::Detach(const std::shared_ptr<SharedInbox>& inbox) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [tag, call] : calls_) {
    if (call->inbox != inbox) continue;
    call->is_detached = true;
    call->inbox = nullptr;
  }
  return std::exchange(*inbox, {});
}

void SharedSession::LetGo(SharedCall* call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!std::exchange(call->is_detached, false) || !call->is_done) return;
  arena_.GiveBack(call->at, call->bytes);
  if (waiters_ > 0) changed_.notify_all();
}

}  // namespace fp8kvd::client
