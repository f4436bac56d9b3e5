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
//   void act(int index, const convoy::share::Slots& slots, double epsilon) { ... }
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

// Call it at the top of main, in every program that spawns. In a spawned process it runs the
// function and exits. In all other processes it returns at once.
void start(int argc, char** argv);

struct ProcessOptions {
  int count = 1;
  // Time between SIGTERM and SIGKILL when join() ends the others after a failure.
  std::chrono::milliseconds grace = std::chrono::seconds(5);
  // "NAME=value", added to this process's environment; replaces variables of the same name.
  std::vector<std::string> environment = {};
};

// How a process failed.
struct ProcessFailure {
  int index = 0;
  int pid = 0;
  int exit_code = 0;      // 0 if a signal ended it
  int signal = 0;         // 0 if it exited
  std::string exception;  // text of its exception; empty if it threw none

  // "process 1 (pid 123) was ended by signal 9 (SIGKILL)".
  std::string to_string() const;
};

// Processes that were spawned together. Movable. Not thread-safe. The destructor kills those that
// still run. Methods of an empty one throw kInvalidArgument; in a forked child, kUnsupported.
//
// If this process ends, for whatever reason, they are killed with the processes that they started.
// Processes in other process groups or sessions that were not spawned are not killed.
class Processes {
 public:
  Processes() = default;  // empty
  Processes(Processes&&) noexcept;
  Processes& operator=(Processes&&) noexcept;
  ~Processes();

  std::size_t size() const;
  std::vector<int> pids() const;

  // Blocks until all have ended. Returns false at the deadline; it may be called again then. If one
  // fails (throws, exits with a code other than 0, or is ended by a signal), the others are
  // terminated as by terminate(). Then, and on each later call, the first failure is thrown:
  // kRemote with the text of the exception, or kPeerLost with the exit code or signal. failures()
  // has these in parts.
  bool join(const Deadline& deadline);

  // Processes that have failed so far, by index, without those that this process ended. Does not
  // wait.
  std::vector<ProcessFailure> failures();
  // Starts a process again, with the original arguments. Kills it if it still runs. Throws
  // kInvalidArgument if there is no such process.
  void restart(int index);
  // Restarts the failed processes. Returns their failures.
  std::vector<ProcessFailure> restart_failed();

  // Sends SIGTERM, and after `grace` SIGKILL to processes that still run. Blocks until all have
  // ended.
  void terminate(std::chrono::milliseconds grace = std::chrono::seconds(5));

  // A channel to a process; its other end there is spawned()->parent. restart() makes a new one.
  share::Channel channel(int index) const;

 private:
  friend Processes start_processes(const std::vector<std::string>& program,
                                   const ProcessOptions& options, const share::Message& arguments);
  struct Impl;
  explicit Processes(std::unique_ptr<Impl> impl);
  Impl& impl() const;

  std::unique_ptr<Impl> impl_;
};

// What a spawned process knows about itself.
struct Spawned {
  int index = 0;
  int count = 0;
  share::Message arguments;
  share::Channel parent;  // the other end of Processes::channel()
};
// Returns nullptr in a process that was not spawned.
const Spawned* spawned();

// --- For other languages ----------------------------------------------------------------------

// Runs a program `count` times, with one more argument: a ticket. spawn() uses it. Throws as
// spawn().
Processes start_processes(const std::vector<std::string>& program, const ProcessOptions& options,
                          const share::Message& arguments);
// In the started process: takes the arguments, once. From now on the process ends with its parent.
// Throws kInvalidArgument for a bad ticket, or a second one.
const Spawned& adopt_ticket(const std::string& ticket);
// Tells the parent the exception that is about to end this process.
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

// Starts processes that call Function(index, arguments...), with index from 0. Does not wait for
// them. Arguments are converted to the parameters' types and sent; their types are those of
// convoy/values.h. Tensors are shared: what one process writes, the others see. Throws
// kInvalidArgument if main has not called start() or options are bad, kResource if a process cannot
// be started; otherwise as Channel::send.
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
