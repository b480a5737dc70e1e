// SPDX-License-Identifier: Apache-2.0
// The moat binary as a process: argument vectors, no shell. Standard streams are files, so that no pipe can fill up.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/file.h"

namespace moat::test {

// The binary of this build; MOAT_BINARY names another one.
inline std::string moat_binary() {
  const char* other = std::getenv("MOAT_BINARY");
  return other != nullptr ? other : MOAT_BINARY;
}

// A directory that goes away with the object.
class ScratchDir {
 public:
  ScratchDir() {
    std::string name = ::testing::TempDir() + "moat_XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) ADD_FAILURE() << "cannot make " << name;
    path_ = name;
  }
  ~ScratchDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchDir(const ScratchDir&) = delete;
  ScratchDir& operator=(const ScratchDir&) = delete;

  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  std::string write(const std::string& name, const std::string& content) const {
    const Status written = write_file(*this / name, content);
    EXPECT_TRUE(written.ok()) << written.message();
    return *this / name;
  }

 private:
  std::string path_;
};

// One running moat. Killed with the object, or with the thread that made it, whatever comes first.
class Process {
 public:
  explicit Process(std::vector<std::string> arguments, const std::string& input = "") {
    arguments.insert(arguments.begin(), moat_binary());
    const std::string in = scratch_.write("stdin", input), out = scratch_ / "stdout", err = scratch_ / "stderr";
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ == 0) {  // only async-signal-safe calls from here
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::dup2(::open(in.c_str(), O_RDONLY), STDIN_FILENO);
      ::dup2(::open(out.c_str(), O_WRONLY | O_CREAT, 0600), STDOUT_FILENO);
      ::dup2(::open(err.c_str(), O_WRONLY | O_CREAT, 0600), STDERR_FILENO);
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
  }
  ~Process() {
    if (status_ >= 0) return;
    signal(SIGKILL);
    wait();
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const { ::kill(pid_, number); }
  std::string out() const { return text_of("stdout"); }
  std::string err() const { return text_of("stderr"); }
  bool running() { return !reap(WNOHANG); }

  // The exit status, or 128 + the signal that ended it.
  int wait() {
    reap(0);
    return status_;
  }
  // As wait(), -1 if it still runs after `limit`.
  int wait_for(std::chrono::seconds limit) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    while (running() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return status_;
  }

 private:
  std::string text_of(const std::string& name) const {
    Result<std::string> text = read_file(scratch_ / name);
    return text.ok() ? std::move(text).value() : "";
  }
  bool reap(int options) {
    int status = 0;
    if (status_ >= 0) return true;
    if (pid_ <= 0 || ::waitpid(pid_, &status, options) != pid_) return false;
    status_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    return true;
  }

  ScratchDir scratch_;
  pid_t pid_ = -1;
  int status_ = -1;
};

struct Finished {
  int status = 0;
  std::string out, err;
};

// Runs to the end.
inline Finished run_moat(std::vector<std::string> arguments, const std::string& input = "") {
  Process process(std::move(arguments), input);
  const int status = process.wait();
  return {status, process.out(), process.err()};
}

}  // namespace moat::test
