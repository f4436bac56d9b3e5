// What a spawned process does.
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"
#include "base/unique_fd.h"
#include "convoy/spawn.h"
#include "os/file.h"
#include "share/ticket.h"

namespace convoy {
namespace {

using share::Message;

// For what the parent has sent before it started this process.
constexpr std::chrono::seconds kStartLimit{60};

// Set once, before main goes on.
std::atomic<bool> started{false};

struct State {
  Spawned self;
  share::Channel control;
};
std::atomic<State*> state{nullptr};

// Ends this process and what it has started when its parent ends. SIGKILL: the parent's death is no
// event that a program prepares for, and what handles SIGTERM may wait for the dead.
void watch_parent(UniqueFd parent) {
  // Signals are for other threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  auto watch = [pidfd = std::move(parent)] {
    pthread_setname_np(pthread_self(), "convoy-parent");
    pollfd item{pidfd.get(), POLLIN, 0};
    // Only the event counts: a kernel that is short of memory says nothing about the parent.
    while (::poll(&item, 1, -1) < 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (::getpgrp() == ::getpid()) ::kill(0, SIGKILL);
    ::kill(::getpid(), SIGKILL);
  };
  try {
    start_thread(std::move(watch)).detach();  // ends with the process
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// A ticket that somebody made up must not make this process kill itself.
void require_pidfd(int fd) {
  const auto info = read_file(concat("/proc/self/fdinfo/", fd));
  if (!info || info->find("\nPid:") == std::string::npos) {
    fail(ErrorKind::kInvalidArgument, "descriptor ", fd,
         " is not that of a parent: no process of convoy's has started this one");
  }
}

[[noreturn]] void run_spawned(const std::string& ticket) {
  int code = 0;
  try {
    const Spawned& self = adopt_ticket(ticket);
    detail::run_request(detail::FunctionUse::kProcess, self.index, self.arguments);
  } catch (const std::exception& error) {
    report_exception(error.what());
    code = 1;
  } catch (...) {
    report_exception("something that is not a std::exception");
    code = 1;
  }
  std::exit(code);
}

}  // namespace

std::vector<std::string> detail::this_program() {
  if (!started.load()) {
    fail(ErrorKind::kInvalidArgument,
         "spawn: main has not called convoy::start(argc, argv), which belongs at its top: without "
         "it the processes would run main instead of the function");
  }
  // By its name where that still is this program: for who looks at the list of processes.
  const std::filesystem::path self = "/proc/self/exe";
  std::error_code error;
  const auto path = std::filesystem::read_symlink(self, error);
  if (!error && std::filesystem::equivalent(path, self, error) && !error) return {path.string()};
  return {self.string()};
}

void start(int argc, char** argv) {
  started.store(true);
  if (argc == 2 && std::string_view(argv[1]).starts_with(Ticket::kPrefix)) run_spawned(argv[1]);
}

const Spawned* spawned() {
  const State* const known = state.load(std::memory_order_acquire);
  return known ? &known->self : nullptr;
}

const Spawned& adopt_ticket(const std::string& text) {
  if (state.load()) fail(ErrorKind::kInvalidArgument, "this process has its ticket already");
  const Ticket ticket = Ticket::parse(text);
  require_pidfd(ticket.parent);
  watch_parent(UniqueFd(ticket.parent));
  auto* const made = new State;
  made->control = share::Channel::adopt(ticket.control);
  made->self.parent = share::Channel::adopt(ticket.channel);
  made->self.index = ticket.index;
  made->self.count = ticket.count;
  set_log_name(concat("process ", ticket.index));
  state.store(made, std::memory_order_release);
  made->self.arguments = made->control.receive_message(Deadline::after(kStartLimit));
  return made->self;
}

void report_exception(const std::string& text) {
  const State* const known = state.load();
  try {
    if (known) known->control.send(Message{text}, Deadline::after(kStartLimit));
  } catch (const std::exception& error) {
    log_error("could not tell the parent of \"", text, "\": ", error.what());
  }
}

}  // namespace convoy
