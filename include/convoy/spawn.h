#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "convoy/deadline.h"
#include "convoy/functions.h"
#include "convoy/share.h"
#include "convoy/values.h"

// Processes that run a function of this program.
//
//   void act(int index, const convoy::Slots& slots, double epsilon) { ... }
//
//   int main(int argc, char** argv) {
//     convoy::start(argc, argv);                       // first: a spawned process ends in it
//     auto actors = convoy::spawn<act>(4, slots, 0.1);
//     actors.join(std::chrono::minutes(10));
//   }
//
// The program is executed again, never merely forked: libtorch's threads do not survive a fork. See
// docs/reference/processes.md.
namespace convoy {

// Belongs at the top of main, in every program that spawns. In a spawned process it runs the
// function and ends the process; in all others it returns at once.
void start(int argc, char** argv);

struct ProcessOptions {
  int count = 1;
  // Between SIGTERM and SIGKILL, when join() ends the others after a failure.
  std::chrono::milliseconds grace = std::chrono::seconds(5);
  // "NAME=value", in addition to ours and instead of those of ours with the same names.
  std::vector<std::string> environment = {};
};

// How a process failed.
struct ProcessFailure {
  int index = 0;
  int pid = 0;
  int exit_code = 0;      // 0 if a signal ended it
  int signal = 0;         // 0 if it exited
  std::string exception;  // what it threw; empty if it ended otherwise

  // "process 1 (pid 123) was ended by signal 9 (SIGKILL)".
  std::string to_string() const;
};

// Processes that were spawned together. Movable. The destructor kills those that still run. Not
// thread-safe.
//
// If this process ends, for whatever reason, they are killed, with the processes that they have
// started (except those in other process groups or sessions that were not spawned).
class Processes {
 public:
  Processes() = default;  // none
  Processes(Processes&&) noexcept;
  Processes& operator=(Processes&&) noexcept;
  ~Processes();

  std::size_t size() const;
  std::vector<int> pids() const;

  // Waits until all have ended; false at the deadline, and then it may be called again. If one
  // fails (it throws, exits with another code than 0, or a signal ends it), the others are
  // terminated as by terminate(), and the first failure is thrown, each time: kRemote with the text
  // of its exception, kPeerLost with its exit code or signal; failures() has the parts.
  bool join(const Deadline& deadline);

  // Processes that have failed so far, by index, without those that we ended. Does not wait.
  std::vector<ProcessFailure> failures();
  // Starts one again, with the arguments of the beginning; kills it if it runs.
  void restart(int index);
  // Restarts the failed processes; returns how they had failed.
  std::vector<ProcessFailure> restart_failed();

  // SIGTERM, and SIGKILL to what still runs after `grace`; all of them have ended then.
  void terminate(std::chrono::milliseconds grace = std::chrono::seconds(5));

  // To and from one of them, whose end is spawned()->parent. Another one after restart().
  share::Channel channel(int index) const;

 private:
  friend Processes start_processes(const std::vector<std::string>& program,
                                   const ProcessOptions& options, const share::Message& arguments);
  struct Impl;
  explicit Processes(std::unique_ptr<Impl> impl);
  Impl& impl() const;

  std::unique_ptr<Impl> impl_;
};

// What a spawned process knows of itself.
struct Spawned {
  int index = 0;
  int count = 0;
  share::Message arguments;
  share::Channel parent;  // the other end of Processes::channel()
};
// nullptr in a process that was not spawned.
const Spawned* spawned();

// --- For other languages ----------------------------------------------------------------------

// What spawn() does: runs a program `count` times, with one more argument, a ticket.
Processes start_processes(const std::vector<std::string>& program, const ProcessOptions& options,
                          const share::Message& arguments);
// In the process: takes what it was given; once. From now on it ends with its parent.
const Spawned& adopt_ticket(const std::string& ticket);
// The exception that it is about to end by.
void report_exception(const std::string& text);

// ----------------------------------------------------------------------------------------------

namespace detail {

std::vector<std::string> this_program();

template <class T>
struct WithoutFirst;
template <class First, class... Rest>
struct WithoutFirst<std::tuple<First, Rest...>> {
  using Type = std::tuple<Rest...>;
};

// Registers itself before main, in every process of the program, because spawn() uses kEntry.
template <auto Function>
struct Entry {
  using Values = typename WithoutFirst<typename SignatureOf<Function>::Values>::Type;

  static share::Message run(int index, share::ValueReader& arguments) {
    auto values = arguments.take<Values>();
    std::apply([&](auto&... value) { Function(index, value...); }, values);
    return {};
  }
  static inline const FunctionEntry* const kEntry =
      &register_function<Function>(FunctionUse::kProcess, &run);
};

}  // namespace detail

// Starts processes that call Function(index, arguments...), index from 0. Arguments are converted
// to the types of its parameters and are sent: tensors are shared, so that what one process writes
// the others see. They may be what convoy/values.h knows. Throws as Channel::send;
// kInvalidArgument in a program whose main has not called start(); kResource.
template <auto Function, class... Arguments>
[[nodiscard]] Processes spawn(const ProcessOptions& options, Arguments&&... arguments) {
  using Values = typename detail::Entry<Function>::Values;
  static_assert(std::tuple_size_v<Values> == sizeof...(Arguments),
                "spawn: as many arguments as the function has parameters behind the index");
  static_assert(std::is_void_v<typename detail::SignatureOf<Function>::Result>,
                "spawn: the function returns nothing; results go over tensors or channels, or use "
                "ProcessPool");
  share::Message message = detail::function_request(*detail::Entry<Function>::kEntry);
  share::put(message, Values(std::forward<Arguments>(arguments)...));
  return start_processes(detail::this_program(), options, message);
}
template <auto Function, class... Arguments>
[[nodiscard]] Processes spawn(int count, Arguments&&... arguments) {
  return spawn<Function>(ProcessOptions{.count = count}, std::forward<Arguments>(arguments)...);
}

}  // namespace convoy
