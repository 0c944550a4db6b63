// tests/e2e/daemon_process.h: the built binaries as processes of a test: started, waited for, ended
// by their own pid.
#pragma once

#include <fcntl.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/built_programs.h"

namespace fp8kvd::testing {

template <typename Condition>
bool WaitUntil(Condition condition, int milliseconds = 60000) {
  for (int i = 0; i < milliseconds / 5; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return condition();
}

inline std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// A folder that goes with its owner.
class TempFolder {
 public:
  TempFolder() {
    std::string path = (std::filesystem::temp_directory_path() / "fp8kvd_e2e_XXXXXX").string();
    path_ = mkdtemp(path.data());
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

class Process {
 public:
  // stdout and stderr go to the file.
  Process(const std::string& binary, const std::vector<std::string>& args,
          const std::filesystem::path& output) {
    std::vector<char*> argv = {const_cast<char*>(binary.c_str())};
    for (const std::string& arg : args) argv.push_back(const_cast<char*>(arg.c_str()));
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      std::signal(SIGINT, SIG_DFL);  // ignored where a shell has put the test into the background
      const int file = open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
      dup2(file, STDOUT_FILENO);
      dup2(file, STDERR_FILENO);
      execv(binary.c_str(), argv.data());
      _exit(127);
    }
  }
  ~Process() {
    if (pid_ > 0) {
      Kill(SIGKILL);
      Wait();
    }
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  // Nothing, when it has ended: kill(-1) would signal every process there is.
  void Kill(int signal) const {
    if (pid_ > 0) kill(pid_, signal);
  }

  bool HasExited() {
    if (pid_ > 0 && waitpid(pid_, &status_, WNOHANG) == pid_) pid_ = -1;
    return pid_ < 0;
  }
  // The exit code; 128 + the signal that ended it; -1 when it does not end.
  int Wait() {
    if (!WaitUntil([this] { return HasExited(); })) return -1;
    return WIFEXITED(status_) ? WEXITSTATUS(status_) : 128 + WTERMSIG(status_);
  }

 private:
  pid_t pid_ = -1;
  int status_ = 0;
};

struct DaemonSetup {
  std::string device = DeviceUnderTest();
  std::string binary = BuiltProgram("fp8kvd");
  std::string models =
      "models { name: \"m\" layers: 2 q_heads: 4 kv_heads: 2 head_dim: 64\n"
      "  precision: bf16 expected_seqs: 16 expected_tokens: 1024 }\n"
      "models { name: \"m8\" layers: 2 q_heads: 4 kv_heads: 2 head_dim: 64\n"
      "  precision: fp8_kv expected_seqs: 16 expected_tokens: 1024 }\n";
  std::vector<std::string> flags = {};  // more of them
};

// fp8kvd on free ports of the loopback.
class Daemon {
 public:
  explicit Daemon(const DaemonSetup& setup = {}) {
    std::ofstream(folder_ / "config.textproto") << setup.models;
    std::vector<std::string> args = {"--config=" + (folder_ / "config.textproto").string(),
                                     "--device=" + setup.device,
                                     "--allow_fp8_kv=true",
                                     "--listen_address=127.0.0.1:0",
                                     "--http_address=127.0.0.1:0",
                                     "--log_format=json",
                                     "--shm_socket=" + (folder_ / "shm").string(),
                                     "--port_file=" + (folder_ / "port").string()};
    args.insert(args.end(), setup.flags.begin(), setup.flags.end());
    process_ = std::make_unique<Process>(setup.binary, args, folder_ / "log");
    EXPECT_TRUE(WaitUntil([this] {
      return std::filesystem::exists(folder_ / "port") || process_->HasExited();
    })) << log();
    std::ifstream(folder_ / "port") >> port_;
    EXPECT_GT(port_, 0) << log();
  }

  int port() const { return port_; }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  std::string log() const { return ReadFile(folder_ / "log"); }
  int http_port() const {
    const std::string text = log();
    const std::string before = "http://127.0.0.1:";
    const size_t at = text.find(before);
    return at == std::string::npos ? 0 : std::atoi(text.c_str() + at + before.size());
  }
  Process& process() { return *process_; }
  const TempFolder& folder() const { return folder_; }

  // SIGTERM, and the exit code.
  int Stop() {
    process_->Kill(SIGTERM);
    return process_->Wait();
  }

 private:
  TempFolder folder_;
  std::unique_ptr<Process> process_;
  int port_ = 0;
};

}  // namespace fp8kvd::testing
