#pragma once

// Another process for a test without torch, made by fork(): with a socket to it, and memory that
// both have.

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <exception>
#include <functional>
#include <optional>
#include <span>

#include "base/unique_fd.h"
#include "os/socket.h"

namespace convoy::share::test {

// While it lives, this process can open no descriptor.
class NoDescriptors {
 public:
  NoDescriptors() {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    // Not 0: poll() takes no more descriptors than a process may have.
    const int next = ::dup(STDERR_FILENO);
    ::close(next);
    const rlimit none{static_cast<rlim_t>(next), before_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  }
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;
  ~NoDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

// Memory that a child made later has too.
class CommonMemory {
 public:
  explicit CommonMemory(std::size_t bytes)
      : bytes_(bytes),
        data_(static_cast<std::byte*>(
            ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  CommonMemory(const CommonMemory&) = delete;
  CommonMemory& operator=(const CommonMemory&) = delete;
  ~CommonMemory() { ::munmap(data_, bytes_); }

  std::span<std::byte> span() const { return {data_, bytes_}; }

 private:
  std::size_t bytes_;
  std::byte* data_;
};

// One side's view of the other.
class Side {
 public:
  Side(int control, int data) : control_(control), data_(data) {}

  void tell() const { EXPECT_EQ(::write(control_.get(), "x", 1), 1); }
  // False: the other side has ended.
  bool await() const {
    char got = 0;
    return ::read(control_.get(), &got, 1) == 1;
  }
  Socket socket() { return Socket(std::move(data_)); }  // once

 private:
  UniqueFd control_;
  UniqueFd data_;
};

class Forked {
 public:
  enum class Where {
    kHere,
    kNewPidNamespace,  // which still sees the /proc of the old one
    kOwnProc,          // likewise, with a /proc of its own where it may mount one
  };
  // The function is true for success; what it throws is a failure.
  using Function = std::function<bool(Side&)>;

  explicit Forked(const Function& function, Where where = Where::kHere) {
    std::array<int, 2> control{}, data{};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, control.data()), 0);
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, data.data()), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(control[0]);
      ::close(data[0]);
      if (where != Where::kHere) enter_new_pid_namespace(where);
      Side side(control[1], data[1]);
      ::_exit(run(function, side));
    }
    ::close(control[1]);
    ::close(data[1]);
    side_.emplace(control[0], data[0]);
  }
  Forked(const Forked&) = delete;
  Forked& operator=(const Forked&) = delete;
  ~Forked() {
    if (pid_ > 0) end();
  }

  // Whether a process of this user may have a pid namespace of its own.
  static bool can_have_pid_namespace() {
    const Forked probe([](Side&) { return ::getpid() == 1; }, Where::kNewPidNamespace);
    return probe.wait_code() == 0;
  }

  pid_t pid() const { return pid_; }
  Side& side() { return *side_; }
  // Its function was true.
  bool join() {
    const bool good = wait_code() == 0;
    pid_ = 0;
    return good;
  }
  void end() {
    ::kill(pid_, SIGKILL);
    wait_code();
    pid_ = 0;
  }

 private:
  static int run(const Function& function, Side& side) {
    try {
      const bool good = function(side);
      if (!good) std::fprintf(stderr, "the forked process says no\n");
      return good && !testing::Test::HasFailure() ? 0 : 1;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "the forked process throws: %s\n", error.what());
      return 2;
    }
  }
  // The caller's child is the first process of it.
  static void enter_new_pid_namespace(Where where) {
    const int flags = CLONE_NEWPID | CLONE_NEWNS;
    if (::unshare(flags) < 0 && ::unshare(CLONE_NEWUSER | flags) < 0) ::_exit(3);
    const pid_t inside = ::fork();
    if (inside == 0) {
      if (where == Where::kOwnProc) {
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr);
        ::mount("proc", "/proc", "proc", 0, nullptr);
      }
      return;
    }
    int status = 0;
    ::waitpid(inside, &status, 0);
    ::_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 4);
  }
  int wait_code() const {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
  }

  pid_t pid_ = 0;
  std::optional<Side> side_;
};

}  // namespace convoy::share::test
