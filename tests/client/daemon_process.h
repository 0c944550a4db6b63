// tests/client/daemon_process.h: the built fp8kvd as a process of its own, on a free loopback port.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/built_programs.h"

namespace fp8kvd::client {

// Starts it with stdout into stdout_fd (-1: dropped) and stderr into that file.
inline pid_t Spawn(const std::vector<std::string>& words, int stdout_fd,
                   const std::string& stderr_path = "/dev/null") {
  std::vector<char*> argv;
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, stderr_path.c_str(),
                                   O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (stdout_fd < 0) {
    posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  } else {
    posix_spawn_file_actions_adddup2(&actions, stdout_fd, STDOUT_FILENO);
  }
  pid_t pid = -1;
  const int error = posix_spawn(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::runtime_error("cannot start " + words[0]);
  return pid;
}

class DaemonProcess {
 public:
  // config: a textproto. port 0: any free one.
  explicit DaemonProcess(const std::string& config, int port = 0,
                         const std::vector<std::string>& flags = {}) {
    std::string directory = std::filesystem::temp_directory_path() / "fp8kvd_test_XXXXXX";
    directory_ = mkdtemp(directory.data());
    std::ofstream(directory_ / "config.textproto") << config;
    Start(port, flags);
  }

  // After its End: another one in the same place.
  void Start(int port, const std::vector<std::string>& flags = {}) {
    int pipe_fds[2];
    if (pipe2(pipe_fds, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
    std::vector<std::string> words = {BuiltProgram("fp8kvd"),
                                      "--config=" + (directory_ / "config.textproto").string(),
                                      "--device=" + DeviceUnderTest(),
                                      "--http_address=",
                                      "--shm_socket=" + shm_socket().string(),
                                      "--listen_address=127.0.0.1:" + std::to_string(port)};
    words.insert(words.end(), flags.begin(), flags.end());
    port_ = 0;
    pid_ = Spawn(words, pipe_fds[1], directory_ / "log");
    close(pipe_fds[1]);
    // An end without this line means that it did not start.
    constexpr std::string_view kReady = "fp8kvd listening on 127.0.0.1:";
    FILE* out = fdopen(pipe_fds[0], "r");
    char line[256];
    while (port_ == 0 && fgets(line, sizeof(line), out) != nullptr) {
      if (std::string_view(line).substr(0, kReady.size()) != kReady) continue;
      port_ = static_cast<int>(std::strtol(line + kReady.size(), nullptr, 10));
    }
    fclose(out);
    if (port_ == 0) throw std::runtime_error("fp8kvd did not start");
  }

  ~DaemonProcess() {
    if (pid_ > 0) End(SIGKILL);
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }

  int port() const { return port_; }
  // What it has logged so far.
  std::string Log() const {
    std::ifstream file(directory_ / "log");
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::string target() const { return "127.0.0.1:" + std::to_string(port_); }

  // Where clients of this host connect.
  std::filesystem::path shm_socket() const { return directory_ / "shm"; }

  // Sends the signal, waits for the end, gives the exit code (-signal if one ended it); -1 when it
  // has ended before, for kill(-1) would signal every process there is.
  int End(int signal) {
    if (pid_ <= 0) return -1;
    int status = 0;
    kill(pid_, signal);
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  std::filesystem::path directory_;
  pid_t pid_ = -1;
  int port_ = 0;
};

}  // namespace fp8kvd::client
