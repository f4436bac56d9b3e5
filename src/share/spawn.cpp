#include "convoy/spawn.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>

#include "base/error.h"
#include "base/unique_fd.h"
#include "os/fork_guard.h"
#include "os/process.h"
#include "share/ticket.h"

extern char** environ;

namespace convoy {
namespace {

// A killed process that waits in the kernel does not end at once.
constexpr std::chrono::seconds kKillLimit{10};

// Ours, with changes.
std::vector<std::string> environment_with(const std::vector<std::string>& changes) {
  std::vector<std::string> result = changes;
  const auto name_of = [](std::string_view line) { return line.substr(0, line.find('=')); };
  for (char** line = environ; line && *line; ++line) {
    const bool changed = std::any_of(changes.begin(), changes.end(), [&](const std::string& other) {
      return name_of(other) == name_of(*line);
    });
    if (!changed) result.emplace_back(*line);
  }
  return result;
}

void check(const std::vector<std::string>& program, const ProcessOptions& options) {
  if (program.empty()) fail(ErrorKind::kInvalidArgument, "spawn: no program to run");
  if (options.count < 1) {
    fail(ErrorKind::kInvalidArgument, "spawn: count must be >= 1, got ", options.count);
  }
  for (const std::string& line : options.environment) {
    if (line.find('=') == std::string::npos || line.starts_with('=')) {
      fail(ErrorKind::kInvalidArgument, "spawn: ", in_quotes(line),
           " in the environment is not NAME=value");
    }
  }
}

}  // namespace

std::string Ticket::to_string() const {
  return concat(kPrefix, control, ",", channel, ",", parent, ",", index, ",", count);
}

Ticket Ticket::parse(std::string_view text) {
  std::array<int, 5> numbers{};
  const bool known = text.starts_with(kPrefix);
  const char* at = text.data() + (known ? kPrefix.size() : 0);
  const char* const end = text.data() + text.size();
  for (std::size_t i = 0; known && i < numbers.size(); ++i) {
    const auto [next, error] = std::from_chars(at, end, numbers[i]);
    const bool last = i + 1 == numbers.size();
    if (error != std::errc() || numbers[i] < 0 ||
        (last ? next != end : next == end || *next != ','))
      break;
    if (last) return {numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]};
    at = next + 1;
  }
  fail(ErrorKind::kInvalidArgument, in_quotes(text), " is not a ticket of a spawned process");
}

std::string ProcessFailure::to_string() const {
  const std::string who = concat("process ", index, " (pid ", pid, ")");
  if (!exception.empty()) return concat(who, " threw: ", exception);
  if (signal != 0) {
    return concat(who, " was ended by ", ExitStatus{.code = 0, .signal = signal}.to_string());
  }
  return concat(who, " ended with exit code ", exit_code);
}

struct Processes::Impl {
  struct Worker {
    ChildProcess child;
    share::Channel control;
    share::Channel channel;
    int pid = 0;
    bool ended = false;
    bool ended_by_us = false;
    std::optional<ProcessFailure> failure;
  };

  Impl(std::vector<std::string> words, const ProcessOptions& chosen, share::Message message)
      : program(std::move(words)),
        options(chosen),
        arguments(std::move(message)),
        environment(environment_with(chosen.environment)),
        workers(static_cast<std::size_t>(chosen.count)) {}

  void start(int index) {
    auto [control, their_control] = share::channel();
    auto [channel, their_channel] = share::channel();
    control.send(arguments);
    // Above 0, 1 and 2, as all of ours.
    const UniqueFd control_end(their_control.release());
    const UniqueFd channel_end(their_channel.release());
    const UniqueFd self = open_pidfd(::getpid());
    if (!self) fail_errno("opening a pidfd (Linux 5.3 or newer is needed)");
    const Ticket ticket{control_end.get(), channel_end.get(), self.get(), index, options.count};
    SpawnOptions how{.arguments = program,
                     .environment = environment,
                     .inherited = {ticket.control, ticket.channel, ticket.parent},
                     // So that one that is stopped sees that we have ended. Our thread may end
                     // sooner: it does no harm.
                     .death_signal = SIGCONT,
                     .own_process_group = true};
    how.arguments.push_back(ticket.to_string());
    Worker worker;
    worker.child = ChildProcess::spawn(how);
    worker.pid = worker.child.pid();
    worker.control = std::move(control);
    worker.channel = std::move(channel);
    workers[static_cast<std::size_t>(index)] = std::move(worker);
  }

  // Takes note of those that have ended, after waiting for one more of them. False at the deadline.
  bool look(const Deadline& deadline) {
    std::vector<pollfd> items;
    std::vector<std::size_t> indices;
    for (std::size_t i = 0; i < workers.size(); ++i) {
      if (workers[i].ended || workers[i].pid == 0) continue;
      items.push_back({workers[i].child.pidfd(), POLLIN, 0});
      indices.push_back(i);
    }
    if (items.empty()) return true;
    const int found = ::poll(items.data(), items.size(), deadline.poll_timeout_ms());
    if (found < 0 && errno != EINTR) fail_errno("waiting for processes");
    if (found <= 0) return !deadline.expired();
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (items[i].revents != 0) note_end(indices[i]);
    }
    return true;
  }

  void note_end(std::size_t index) {
    Worker& worker = workers[index];
    const auto raised = exception_of(worker.control);
    // Before it is reaped, while its number is its own: what it has started and left behind.
    const auto peeked = exit_status_of(worker.pid, worker.child.pidfd());
    if (!peeked || !peeked->success() || raised) worker.child.kill_group(SIGKILL);
    const auto status = worker.child.wait(Deadline::after(kKillLimit));
    worker.ended = true;
    worker.control = {};
    if (status && (!status->success() || raised)) {
      worker.failure = ProcessFailure{.index = static_cast<int>(index),
                                      .pid = worker.pid,
                                      .exit_code = status->code,
                                      .signal = status->signal,
                                      .exception = raised.value_or("")};
    }
  }

  static std::optional<std::string> exception_of(const share::Channel& control) {
    try {
      if (const auto message = control.try_receive()) return message->text(0);
    } catch (const Error&) {  // it has ended without a word
    }
    return std::nullopt;
  }

  bool all_ended() const {
    return std::all_of(workers.begin(), workers.end(),
                       [](const Worker& w) { return w.ended || w.pid == 0; });
  }

  void terminate(std::chrono::milliseconds grace) {
    if (grace.count() > 0) signal_all(SIGTERM);
    const auto until = Deadline::after(grace);
    while (!all_ended() && look(until) && !until.expired()) {
    }
    signal_all(SIGKILL);
    const auto limit = Deadline::after(kKillLimit);
    while (!all_ended() && look(limit)) {
    }
  }

  void signal_all(int signal) {
    for (Worker& worker : workers) {
      if (worker.ended || worker.pid == 0) continue;
      worker.ended_by_us = true;
      if (signal == SIGKILL) {
        worker.child.kill_group(signal);
      } else {
        worker.child.kill(signal);
      }
    }
  }

  Worker& worker(int index) {
    if (index < 0 || static_cast<std::size_t>(index) >= workers.size()) {
      fail(ErrorKind::kInvalidArgument, "process ", index, " does not exist: there are ",
           workers.size());
    }
    return workers[static_cast<std::size_t>(index)];
  }

  std::optional<ProcessFailure> first_failure() const {
    for (const Worker& worker : workers) {
      if (worker.failure && !worker.ended_by_us) return worker.failure;
    }
    return std::nullopt;
  }

  const std::vector<std::string> program;
  const ProcessOptions options;
  const share::Message arguments;
  const std::vector<std::string> environment;
  std::vector<Worker> workers;
  std::optional<ProcessFailure> thrown;  // by join()
  const unsigned generation = fork_generation();
};

Processes::Processes(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Processes::Processes(Processes&&) noexcept = default;

Processes& Processes::operator=(Processes&& other) noexcept {
  Processes before(std::move(*this));
  impl_ = std::move(other.impl_);
  return *this;
}

Processes::~Processes() {
  if (!impl_) return;
  if (impl_->generation != fork_generation()) {  // they are children of the process that forked us
    static_cast<void>(impl_.release());
    return;
  }
  try {
    impl_->terminate(std::chrono::milliseconds(0));
  } catch (...) {  // the children's own destructors kill them
  }
}

Processes::Impl& Processes::impl() const {
  if (!impl_) fail(ErrorKind::kInvalidArgument, "this Processes object is empty; spawn gives one");
  if (impl_->generation != fork_generation()) {
    fail(ErrorKind::kUnsupported,
         "these processes are children of the parent of this forked process: wait for them and "
         "signal them there");
  }
  return *impl_;
}

std::size_t Processes::size() const { return impl().workers.size(); }

std::vector<int> Processes::pids() const {
  std::vector<int> found;
  for (const auto& worker : impl().workers) found.push_back(worker.pid);
  return found;
}

bool Processes::join(const Deadline& deadline) {
  Impl& self = impl();
  for (;;) {
    if (!self.thrown) {
      self.thrown = self.first_failure();
      if (self.thrown) self.terminate(self.options.grace);
    }
    if (self.thrown) {
      fail(self.thrown->exception.empty() ? ErrorKind::kPeerLost : ErrorKind::kRemote,
           self.thrown->to_string());
    }
    if (self.all_ended()) return true;
    if (!self.look(deadline)) return false;
  }
}

std::vector<ProcessFailure> Processes::failures() {
  Impl& self = impl();
  self.look(Deadline::after(std::chrono::seconds(0)));
  std::vector<ProcessFailure> found;
  for (const auto& worker : self.workers) {
    if (worker.failure && !worker.ended_by_us) found.push_back(*worker.failure);
  }
  return found;
}

void Processes::restart(int index) {
  Impl& self = impl();
  Impl::Worker& worker = self.worker(index);
  if (!worker.ended && worker.pid != 0) {
    worker.child.kill_group(SIGKILL);
    worker.child.wait(Deadline::after(kKillLimit));
    worker.ended = worker.ended_by_us = true;
  }
  if (self.thrown && self.thrown->index == index) self.thrown.reset();
  self.start(index);
}

std::vector<ProcessFailure> Processes::restart_failed() {
  auto failed = failures();
  for (const auto& failure : failed) restart(failure.index);
  return failed;
}

void Processes::terminate(std::chrono::milliseconds grace) { impl().terminate(grace); }

share::Channel Processes::channel(int index) const { return impl().worker(index).channel; }

Processes start_processes(const std::vector<std::string>& program, const ProcessOptions& options,
                          const share::Message& arguments) {
  check(program, options);
  Processes processes(std::make_unique<Processes::Impl>(program, options, arguments));
  for (int i = 0; i < options.count; ++i) processes.impl_->start(i);
  return processes;
}

}  // namespace convoy
