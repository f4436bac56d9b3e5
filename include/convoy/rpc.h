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
#include "convoy/detail/rpc_values.h"
#include "convoy/future.h"
#include "convoy/rpc_error.h"
#include "convoy/rpc_function.h"
#include "convoy/rpc_operator.h"
#include "convoy/rpc_options.h"
#include "convoy/rpc_stats.h"

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

// One worker's handle to a session. Copies are the same session. It ends with shutdown(), or
// abruptly when the last copy outside handlers is destroyed. Thread-safe.
class Session {
 public:
  // Meets the other workers: blocks until each of them has constructed its session (with
  // kComeAndGo, only until this one has joined). A process may have several sessions. Throws
  // kInvalidArgument for bad options, and for a bad or duplicate name ("is not unique", on all
  // workers); otherwise what rendezvous() throws.
  explicit Session(const SessionOptions& options = {});
  explicit Session(std::shared_ptr<detail::SessionImpl> impl) : impl_(std::move(impl)) {}

  // Runs a function that has CONVOY_RPC on another worker or on this one, and blocks until its
  // result is there. Arguments are converted to the function's parameters. Throws RemoteError:
  // kRemote if the function threw, kTimeout at the deadline, kPeerLost if the worker is gone,
  // kCancelled if this session ends, kInvalidArgument if the worker does not have this function
  // with this signature. Throws Error: kInvalidArgument for an unknown worker or after shutdown,
  // kUnsupported for a tensor that cannot be passed or in a forked child, kResource if memory or a
  // limit is exhausted (WhenFull).
  template <auto Function, class... Arguments>
  auto rpc_sync(const To& to, Arguments&&... arguments) const;
  // The same without blocking: returns a Future<> of the result.
  template <auto Function, class... Arguments>
  auto rpc_async(const To& to, Arguments&&... arguments) const;
  // The same without blocking; the result stays on that worker. Returns an RRef<> to it
  // (convoy/rref.h). If the function throws, every use of the value throws that error.
  template <auto Function, class... Arguments>
  auto remote(const To& to, Arguments&&... arguments) const;
  // Makes an RRef<> to a value of this worker, to be passed on.
  template <class T>
  auto rref(T&& value) const;
  // A target with options, for calls like those above. Throws kInvalidArgument for an unknown
  // worker or a negative timeout.
  Target to(const To& worker, const CallOptions& options = {}) const;

  // Calls an operator of torch by name ("aten::add", "aten::add.Tensor"), if the other worker's
  // SessionOptions::operators lists it: rpc_sync<at::Tensor>("worker1", rpc::op("aten::add"), a,
  // b).
  template <class Result, class... Arguments>
  Result rpc_sync(const To& to, const Operator& op, Arguments&&... arguments) const;
  template <class Result, class... Arguments>
  Future<Result> rpc_async(const To& to, const Operator& op, Arguments&&... arguments) const;

  WorkerInfo worker_info() const;  // this worker
  // Throws kInvalidArgument ("could not find destination") if there is no such worker.
  WorkerInfo worker_info(const To& worker) const;
  std::vector<WorkerInfo> workers() const;  // by rank
  int size() const;

  // With kComeAndGo, blocks until a worker of this name has joined. Throws kTimeout. `timeout` here
  // and below is as in CallOptions.
  WorkerInfo wait_for(const std::string& name, const Timeout& timeout = {}) const;
  View view() const;
  // Calls `callback` for each later view, one at a time, on the session's threads. Returns the last
  // view before those. No callback runs once shutdown() has returned; the same for on_lost().
  View on_change(std::function<void(const View&)> callback) const;
  // Calls `callback` once, on a thread of the session, when that worker leaves or is lost; soon if
  // it has already. Not called when this session ends.
  void on_lost(const To& worker,
               std::function<void(const WorkerInfo&, const Error&)> callback) const;

  // Collects a value from each of these workers (default: all), by name. Blocks until all of them
  // have called it. Throws kTimeout and names the missing workers.
  template <class T>
  std::map<std::string, T> all_gather(const T& value, const std::vector<std::string>& names = {},
                                      const Timeout& timeout = {}) const;
  // The same without values.
  void barrier(const std::vector<std::string>& names = {}, const Timeout& timeout = {}) const;

  // Ends the session: see ShutdownOptions for what it waits for and throws. Blocks. A second call
  // does nothing.
  void shutdown(const ShutdownOptions& options = {}) const;

  std::chrono::milliseconds timeout() const;
  // For calls that begin from now on. 0: no limit. Throws kInvalidArgument if negative.
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

// A worker and the options of calls to it. A value. The methods are as those of Session.
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

// The call whose handler runs on this thread. Also available in continuations of a handler's
// coroutine. Thread-safe.
class CurrentCall {
 public:
  // Throws kCancelled if the session has ended.
  Session session() const;
  const WorkerInfo& caller() const;
  const std::string& function() const;
  // How long the caller waits.
  Deadline deadline() const;
  // True if the result is no longer needed: the caller cancelled, timed out or died.
  bool cancelled() const;

 private:
  friend CurrentCall current();
  struct State;
  explicit CurrentCall(std::shared_ptr<const State> state) : state_(std::move(state)) {}

  std::shared_ptr<const State> state_;
};
// Throws kInvalidArgument outside a handler.
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
