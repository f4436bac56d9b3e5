#include "support/stack_dump.h"

#include <execinfo.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <thread>
#include <vector>

#include "base/concat.h"
#include "convoy/deadline.h"
#include "os/file.h"
#include "os/process.h"

namespace convoy::test {
namespace {

constexpr std::string_view kTail = "--- end of stack\n";

int dump_signal() { return SIGRTMAX - 3; }

std::atomic<int> dumps_written{0};

void write_stack(int) {
  const int saved = errno;
  std::array<char, 16> name{};
  prctl(PR_GET_NAME, name.data());
  std::array<char, 80> head{};
  const int size = std::snprintf(head.data(), head.size(), "--- stack of thread %ld (%s)\n",
                                 static_cast<long>(::syscall(SYS_gettid)), name.data());
  std::array<void*, 48> frames;
  const int depth = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  [[maybe_unused]] const auto written =
      ::write(STDERR_FILENO, head.data(), static_cast<std::size_t>(size));
  ::backtrace_symbols_fd(frames.data(), depth, STDERR_FILENO);
  [[maybe_unused]] const auto ended = ::write(STDERR_FILENO, kTail.data(), kTail.size());
  dumps_written.fetch_add(1, std::memory_order_relaxed);
  errno = saved;
}

bool has_handler(pid_t pid) {
  const std::string status = read_file(concat("/proc/", pid, "/status")).value_or("");
  const auto at = status.find("SigCgt:");
  if (at == std::string::npos) return false;
  const auto caught = std::strtoull(status.c_str() + at + 7, nullptr, 16);
  return (caught >> (dump_signal() - 1) & 1) != 0;
}

std::vector<pid_t> threads_of(pid_t pid) {
  std::vector<pid_t> threads;
  std::error_code error;
  for (std::filesystem::directory_iterator it(concat("/proc/", pid, "/task"), error), end;
       !error && it != end; it.increment(error)) {
    threads.push_back(static_cast<pid_t>(std::stol(it->path().filename().string())));
  }
  return threads;
}

std::string one_line(const std::string& path) {
  std::string text = read_file(path).value_or("?");
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

}  // namespace

void install_stack_dump() {
  std::array<void*, 2> frames;
  ::backtrace(frames.data(), 2);  // loads libgcc now: a signal handler must not
  struct sigaction action {};
  action.sa_handler = write_stack;
  action.sa_flags = SA_RESTART;
  sigaction(dump_signal(), &action, nullptr);
}

int request_stacks(pid_t pid) {
  if (!has_handler(pid)) return 0;  // it is still starting: the signal would end it
  const auto threads = threads_of(pid);
  const int before = dumps_written.load(std::memory_order_relaxed);
  int asked = 0;
  for (const pid_t tid : threads) {
    if (::syscall(SYS_tgkill, pid, tid, dump_signal()) == 0) ++asked;
  }
  if (pid != ::getpid()) return asked;
  const auto deadline = Deadline::after(std::chrono::seconds(1));
  while (dumps_written.load(std::memory_order_relaxed) < before + asked && !deadline.expired()) {
    std::this_thread::yield();
  }
  return asked;
}

std::string describe_process(pid_t pid) {
  std::string text;
  for (const pid_t tid : threads_of(pid)) {
    const std::string folder = concat("/proc/", pid, "/task/", tid);
    text += concat("  thread ", tid, " (", one_line(folder + "/comm"), "): state ",
                   process_state(tid).value_or('?'), ", in ", one_line(folder + "/wchan"),
                   ", system call ", one_line(folder + "/syscall"), "\n");
  }
  return text;
}

}  // namespace convoy::test
