// tests/shm/rig.h: a server with the same-host transport on a socket of its own.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/rpc/rig.h"
#include "tests/shm/raw_client.h"

namespace fp8kvd::testing {

class SocketFolder {
 public:
  SocketFolder() {
    std::string path = (std::filesystem::temp_directory_path() / "fp8kvd_shm_XXXXXX").string();
    path_ = mkdtemp(path.data());
  }
  ~SocketFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  SocketFolder(const SocketFolder&) = delete;
  SocketFolder& operator=(const SocketFolder&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

class ShmRig {
 public:
  static ServerRigOptions Options() {
    ServerRigOptions options;
    options.shared_memory.shm_sessions_per_tenant_max = 4;
    options.shared_memory.shm_inflight_max = 8;
    options.shared_memory.shm_session_bytes_max = 2 << 20;
    return options;
  }
  explicit ShmRig(const ServerRigOptions& options = Options())
      : rig_(WithSocket(options, folder_ / "socket")) {}
  ServerRig* operator->() { return &rig_; }
  ServerRig& operator*() { return rig_; }
  std::string socket_path() const { return folder_ / "socket"; }

  // A step of the sequence through this client; whether its answer is right.
  bool Steps(RawClient& client, const v1::Handle& handle, uint64_t pos,
             std::vector<uint64_t>& history) {
    const uint64_t id = 1000 + pos;
    client.Push(client.Place(rig_.Step({handle}, pos, {id})));
    const std::optional<shm::Reply> reply = client.Wait();
    history.push_back(id);
    return reply.has_value() && reply->code == 0 &&
           rig_.IsAnswer(client.Decoded(*reply), 0, id + 500000, history);
  }

 private:
  static ServerRigOptions WithSocket(ServerRigOptions options, const std::string& path) {
    options.shared_memory.shm_socket = path;
    return options;
  }

  SocketFolder folder_;
  ServerRig rig_;
};

}  // namespace fp8kvd::testing
