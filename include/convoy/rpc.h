#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "convoy/deadline.h"
#include "convoy/detail/rpc_call.h"
#include "convoy/future.h"
#include "convoy/rpc_error.h"
#include "convoy/rpc_function.h"
#include "convoy/rpc_operator.h"
#include "convoy/rpc_options.h"
#include "convoy/rpc_stats.h"
#include "convoy/rpc_values.h"

// Calls of functions in other processes.
//
//   at::Tensor my_add(at::Tensor a, at::Tensor b) { return a + b; }
//   CONVOY_RPC(my_add);                                     // others may call it
//
//   convoy::rpc::Session rpc({.name = "worker0"});
//   auto t3 = rpc.rpc_sync<my_add>("worker1", t1, t2);      // waits
//   auto fut = rpc.rpc_async<my_add>("worker1", t1, t2);    // Future<at::Tensor>
//   auto t4 = rpc.to("worker1", {.timeout = 5s}).rpc_sync<my_add>(t1, t2);
//   rpc.shutdown();
//
// See docs/reference/rpc.md.
namespace convoy::rpc {

class Target;

// This worker's part of a session. Copies share it. It ends by shutdown(), or abruptly with the
// last copy outside of handlers. Thread-safe.
class Session {
 public:
  // Meets the other workers; each of them constructs its session. A process may have several.
  // Throws kInvalidArgument for a bad or duplicate name ("is not unique", on all of them), and what
  // rendezvous() throws.
  explicit Session(const SessionOptions& options = {});
  explicit Session(std::shared_ptr<detail::SessionImpl> impl) : impl_(std::move(impl)) {}

  // Runs a function that has CONVOY_RPC on another worker, or on this one, and waits for its
  // result. Arguments are converted to the function's parameters. Throws RemoteError: kRemote with
  // what the function threw, kTimeout, kPeerLost, kCancelled, kInvalidArgument if the worker has no
  // such function or another one; Error kInvalidArgument for an unknown worker or after shutdown.
  template <auto Function, class... Arguments>
  auto rpc_sync(const To& to, Arguments&&... arguments) const;
  // Does not wait: a Future<> of the result.
  template <auto Function, class... Arguments>
  auto rpc_async(const To& to, Arguments&&... arguments) const;
  // Does not wait, and the result stays where it is made: an RRef<> of it (convoy/rref.h). What the
  // function throws is thrown by whoever wants the value.
  template <auto Function, class... Arguments>
  auto remote(const To& to, Arguments&&... arguments) const;
  // An RRef<> of a value here, to be passed on.
  template <class T>
  auto rref(T&& value) const;
  // The same for calls with options.
  Target to(const To& worker, const CallOptions& options = {}) const;

  // An operator of torch's by name ("aten::add", "aten::add.Tensor"), where the other side's
  // SessionOptions::operators has it: rpc_sync<at::Tensor>("worker1", rpc::op("aten::add"), a, b).
  template <class Result, class... Arguments>
  Result rpc_sync(const To& to, const Operator& op, Arguments&&... arguments) const;
  template <class Result, class... Arguments>
  Future<Result> rpc_async(const To& to, const Operator& op, Arguments&&... arguments) const;

  WorkerInfo worker_info() const;  // this one
  // kInvalidArgument: "could not find destination".
  WorkerInfo worker_info(const To& worker) const;
  std::vector<WorkerInfo> workers() const;  // by rank
  int size() const;

  // Waits until a worker of this name is there, where workers come and go. kTimeout. `timeout`
  // here and below as in CallOptions.
  WorkerInfo wait_for(const std::string& name, const Timeout& timeout = {}) const;
  View view() const;
  // Calls `callback` for each later view, one at a time, on the session's threads. Returns the view
  // before the first of them.
  View on_change(std::function<void(const View&)> callback) const;
  // Calls `callback` once, on a thread of the session, when that worker leaves or is lost; soon if
  // it already has. Not called when this session ends.
  void on_lost(const To& worker,
               std::function<void(const WorkerInfo&, const Error&)> callback) const;

  // Collects a value from each of these workers (default: all), by name. Each of them must call it.
  // kTimeout names the missing ones.
  template <class T>
  std::map<std::string, T> all_gather(const T& value, const std::vector<std::string>& names = {},
                                      const Timeout& timeout = {}) const;
  void barrier(const std::vector<std::string>& names = {}, const Timeout& timeout = {}) const;

  void shutdown(const ShutdownOptions& options = {}) const;

  std::chrono::milliseconds timeout() const;
  // Of calls that are made from now on.
  void set_timeout(std::chrono::milliseconds timeout) const;
  Stats stats() const;
  RRefInfo rref_info() const;

  // For other layers of this library.
  const std::shared_ptr<detail::SessionImpl>& impl() const { return impl_; }

 private:
  friend class Target;
  std::map<std::string, std::string> gather_bytes(const std::string& mine,
                                                  const std::vector<std::string>& names,
                                                  const Timeout& timeout) const;

  std::shared_ptr<detail::SessionImpl> impl_;
};

// A worker of a session, and options of the calls to it. A value.
class Target {
 public:
  template <auto Function, class... Arguments>
  auto rpc_sync(Arguments&&... arguments) const;
  template <auto Function, class... Arguments>
  auto rpc_async(Arguments&&... arguments) const;
  template <auto Function, class... Arguments>
  auto remote(Arguments&&... arguments) const;

 private:
  friend class Session;
  Target(Session session, std::uint32_t worker, const CallOptions& options)
      : session_(std::move(session)), worker_(worker), options_(options) {}

  Session session_;
  std::uint32_t worker_;
  CallOptions options_;
};

// The call whose handler runs on this thread. Continuations of a coroutine have it, too.
class CurrentCall {
 public:
  // kCancelled if it has ended.
  Session session() const;
  const WorkerInfo& caller() const;
  const std::string& function() const;
  // Until when the caller waits.
  Deadline deadline() const;
  // True if nobody waits for the result: the caller cancelled, timed out or died.
  bool cancelled() const;

 private:
  friend CurrentCall current();
  struct State;
  explicit CurrentCall(std::shared_ptr<const State> state) : state_(std::move(state)) {}

  std::shared_ptr<const State> state_;
};
// kInvalidArgument outside of a handler.
CurrentCall current();

// ----------------------------------------------------------------------------------------------

template <auto Function, class... Arguments>
auto Session::rpc_sync(const To& to, Arguments&&... arguments) const {
  return detail::call_sync<Function>(impl_, detail::find_worker(*impl_, to), {}, detail::NoObject(),
                                     std::forward<Arguments>(arguments)...);
}
template <auto Function, class... Arguments>
auto Session::rpc_async(const To& to, Arguments&&... arguments) const {
  return detail::call_async<Function>(impl_, detail::find_worker(*impl_, to), {},
                                      detail::NoObject(), std::forward<Arguments>(arguments)...);
}
template <auto Function, class... Arguments>
auto Target::rpc_sync(Arguments&&... arguments) const {
  return detail::call_sync<Function>(session_.impl_, worker_, options_, detail::NoObject(),
                                     std::forward<Arguments>(arguments)...);
}
template <auto Function, class... Arguments>
auto Target::rpc_async(Arguments&&... arguments) const {
  return detail::call_async<Function>(session_.impl_, worker_, options_, detail::NoObject(),
                                      std::forward<Arguments>(arguments)...);
}

template <class Result, class... Arguments>
Future<Result> Session::rpc_async(const To& to, const Operator& op,
                                  Arguments&&... arguments) const {
  return rpc_async<detail::run_operator>(
             to, op.name, std::vector<OperatorValue>{detail::operator_value(arguments)...})
      .then([](const std::vector<OperatorValue>& results) {
        return detail::operator_result<Result>(results);
      });
}
template <class Result, class... Arguments>
Result Session::rpc_sync(const To& to, const Operator& op, Arguments&&... arguments) const {
  return rpc_async<Result>(to, op, std::forward<Arguments>(arguments)...).wait();
}

template <class T>
std::map<std::string, T> Session::all_gather(const T& value, const std::vector<std::string>& names,
                                             const Timeout& timeout) const {
  std::map<std::string, T> all;
  for (const auto& [name, bytes] : gather_bytes(detail::to_text(value), names, timeout)) {
    all.emplace(name, detail::from_text<T>(bytes));
  }
  return all;
}

}  // namespace convoy::rpc

#include "convoy/rref.h"  // IWYU pragma: export
