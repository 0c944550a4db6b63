// tests/shm/raw_client.h: a client of the same-host transport that writes into the shared memory
// what a test wants, true or not.
#pragma once

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

#include "fp8kvd/v1/kv.pb.h"
#include "proto/fp8kvd/v1/shared_memory.h"
#include "tests/rpc/rig.h"

namespace fp8kvd::testing {

// A connection to the socket, before any ticket.
class RawSocket {
 public:
  explicit RawSocket(const std::string& path) {
    fd_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    Connect(path);
  }
  void Connect(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.data(), path.size());
    is_connected_ = connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  }
  ~RawSocket() { Close(); }
  RawSocket(const RawSocket&) = delete;
  RawSocket& operator=(const RawSocket&) = delete;

  bool is_connected() const { return is_connected_; }
  int fd() const { return fd_; }
  void Close() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }

  template <typename Packet>
  void Send(const Packet& packet) const {
    EXPECT_EQ(send(fd_, &packet, sizeof(packet), MSG_NOSIGNAL),
              static_cast<ssize_t>(sizeof(packet)));
  }
  void Ring() const {
    const char bell = 0;
    (void)send(fd_, &bell, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  // The next packet that is no bell, and its descriptor. Empty: the end, or none in 20 s.
  std::string Hear(int* fd = nullptr) const {
    for (;;) {
      pollfd readable = {.fd = fd_, .events = POLLIN, .revents = 0};
      if (poll(&readable, 1, 20'000) != 1) return "";
      char packet[1024];
      iovec bytes = {.iov_base = packet, .iov_len = sizeof(packet)};
      alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
      msghdr message{};
      message.msg_iov = &bytes;
      message.msg_iovlen = 1;
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
      const ssize_t got = recvmsg(fd_, &message, 0);
      if (got <= 0) return "";
      if (got == 1) continue;
      const cmsghdr* const header = CMSG_FIRSTHDR(&message);
      if (header != nullptr && fd != nullptr) std::memcpy(fd, CMSG_DATA(header), sizeof(*fd));
      return std::string(packet, static_cast<size_t>(got));
    }
  }
  // Why the server ended it: "CODE: reason".
  std::string HearFarewell() const {
    const std::string packet = Hear();
    if (packet.size() != sizeof(shm::Farewell)) return "no farewell";
    shm::Farewell farewell;
    std::memcpy(&farewell, packet.data(), sizeof(farewell));
    return absl::StrCat(absl::StatusCodeToString(static_cast<absl::StatusCode>(farewell.code)),
                        ": ", farewell.reason);
  }

 private:
  int fd_ = -1;
  bool is_connected_ = false;
};

inline v1::OpenSharedMemoryResponse OpenTicket(const ServerRig& rig) {
  grpc::ClientContext context;
  v1::OpenSharedMemoryRequest request;
  request.set_host_id("this host");
  v1::OpenSharedMemoryResponse response;
  const grpc::Status status = rig.stub->OpenSharedMemory(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return response;
}

inline shm::Hello HelloWith(const std::string& ticket, uint64_t memory_bytes = 1 << 20) {
  shm::Hello hello;
  std::memcpy(hello.ticket, ticket.data(), std::min(ticket.size(), shm::kTicketBytes));
  hello.memory_bytes = memory_bytes;
  return hello;
}

// Where the i-th of several messages in flight lies.
inline uint64_t PlaceOf(uint64_t i) { return i << 17; }

class RawClient {
 public:
  explicit RawClient(const ServerRig& rig) : RawClient(OpenTicket(rig)) {}
  explicit RawClient(const v1::OpenSharedMemoryResponse& open) : socket_(open.unix_socket()) {
    EXPECT_TRUE(socket_.is_connected());
    socket_.Send(HelloWith(open.ticket()));
    const std::string packet = socket_.Hear(&memory_fd_);
    FP8KVD_CHECK(packet.size() == sizeof(layout_));
    std::memcpy(&layout_, packet.data(), sizeof(layout_));
    memory_ = static_cast<uint8_t*>(
        mmap(nullptr, layout_.memory_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory_fd_, 0));
    FP8KVD_CHECK(memory_ != MAP_FAILED);
  }
  ~RawClient() {
    munmap(memory_, layout_.memory_bytes);
    close(memory_fd_);
  }
  RawClient(const RawClient&) = delete;
  RawClient& operator=(const RawClient&) = delete;

  RawSocket& socket() { return socket_; }
  int memory_fd() const { return memory_fd_; }
  const shm::Welcome& layout() const { return layout_; }
  shm::Head& head() { return *reinterpret_cast<shm::Head*>(memory_); }
  uint8_t* data() { return memory_ + layout_.data_at; }
  shm::Request& entry(uint32_t index) {
    return reinterpret_cast<shm::Request*>(memory_ + layout_.requests_at)[index % layout_.entries];
  }

  // The message in the memory from `at` on, with 64 KiB of room for its reply behind it.
  template <typename Message>
  shm::Request Place(Message message, uint64_t at = 0) {
    shm::Request request;
    request.kind =
        std::is_same_v<Message, v1::DecodeRequest> ? shm::Kind::kDecode : shm::Kind::kAppend;
    request.tag = ++last_tag_;
    const auto put = [&](const std::string& bytes, uint64_t* field_at, uint64_t* field_bytes) {
      std::memcpy(data() + at, bytes.data(), bytes.size());
      *field_at = at;
      *field_bytes = bytes.size();
      at = shm::AlignUp(at + bytes.size());
    };
    if constexpr (std::is_same_v<Message, v1::DecodeRequest>) {
      put(message.q(), &request.q_at, &request.q_bytes);
      message.clear_q();
    }
    put(message.k(), &request.k_at, &request.k_bytes);
    put(message.v(), &request.v_at, &request.v_bytes);
    message.clear_k();
    message.clear_v();
    put(message.SerializeAsString(), &request.head_at, &request.head_bytes);
    request.reply_at = at;
    request.reply_bytes = 64 << 10;
    return request;
  }

  void Push(const shm::Request& request) {
    entry(requests_tail_) = request;
    SetRequestsTail(requests_tail_ + 1);
  }
  void SetRequestsTail(uint32_t tail) {
    requests_tail_ = tail;
    Set(head().requests_tail, tail);
    socket_.Ring();
  }
  void Set(shm::Line& line, uint32_t value) { std::atomic_ref<uint32_t>(line.value).store(value); }

  // The next reply; nothing when none comes in 20 s.
  std::optional<shm::Reply> Wait() {
    if (!Eventually([&] { return has_reply(); }, 20'000)) return std::nullopt;
    const auto* const ring = reinterpret_cast<shm::Reply*>(memory_ + layout_.replies_at);
    const shm::Reply reply = ring[replies_head_++ % layout_.entries];
    Set(head().replies_head, replies_head_);
    return reply;
  }
  bool has_reply() {
    return std::atomic_ref<uint32_t>(head().replies_tail.value).load() != replies_head_;
  }

  // A reply's message as gRPC would have given it.
  v1::DecodeResponse Decoded(const shm::Reply& reply) {
    v1::DecodeResponse response;
    EXPECT_EQ(reply.code, 0U) << ErrorOf(reply);
    EXPECT_TRUE(response.ParseFromString(Bytes(reply.head_at, reply.head_bytes)));
    response.set_out(Bytes(reply.out_at, reply.out_bytes));
    response.set_lse(Bytes(reply.lse_at, reply.lse_bytes));
    return response;
  }
  // "CODE: message", "OK" without an error.
  std::string ErrorOf(const shm::Reply& reply) {
    if (reply.code == 0) return "OK";
    v1::Error error;
    EXPECT_TRUE(error.ParseFromString(Bytes(reply.head_at, reply.head_bytes)));
    EXPECT_EQ(error.code(), static_cast<int>(reply.code));
    return absl::StrCat(absl::StatusCodeToString(static_cast<absl::StatusCode>(reply.code)), ": ",
                        error.message());
  }
  std::string Bytes(uint64_t at, uint64_t bytes) {
    if (bytes > layout_.data_bytes || at > layout_.data_bytes - bytes) {
      ADD_FAILURE() << "the reply lies outside";
      return "";
    }
    return std::string(reinterpret_cast<const char*>(data() + at), bytes);
  }

 private:
  RawSocket socket_;
  int memory_fd_ = -1;
  shm::Welcome layout_;
  uint8_t* memory_ = nullptr;
  uint64_t last_tag_ = 100;
  uint32_t requests_tail_ = 0;
  uint32_t replies_head_ = 0;
};

}  // namespace fp8kvd::testing
