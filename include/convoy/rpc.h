#pragma once

#include <array>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "convoy/deadline.h"
#include "convoy/future.h"
#include "convoy/rpc_error.h"
#include "convoy/rpc_function.h"
#include "convoy/rpc_operator.h"
#include "convoy/rpc_stats.h"
#include "convoy/rpc_values.h"
#include "convoy/store.h"

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
// docs/rpc.md is the guide.
namespace convoy::rpc {

struct WorkerInfo {
  std::string name;
  int rank = 0;

  friend bool operator==(const WorkerInfo&, const WorkerInfo&) = default;
};

// Whom a call goes to: a name, a rank, or a WorkerInfo. Refers to the name.
class To {
 public:
  To(const char* name) : name_(name) {}
  To(std::string_view name) : name_(name) {}
  To(const std::string& name) : name_(name) {}
  To(const WorkerInfo& worker) : rank_(worker.rank) {}
  template <std::integral Rank>
  To(Rank rank) : rank_(static_cast<std::int64_t>(rank)) {}

  std::string_view name() const { return name_; }  // empty: by rank
  const std::optional<std::int64_t>& rank() const { return rank_; }

 private:
  std::string_view name_;
  std::optional<std::int64_t> rank_;
};

// Whether the workers of a session are known from the beginning.
enum class Members {
  kFixed,  // all of them make their sessions, and shut them down, together
  kComeAndGo,
};

// Who is in a session. Views are numbered; where workers come and go, all workers see the same
// ones.
struct View {
  std::uint64_t version = 0;
  std::vector<WorkerInfo> workers = {};  // by rank
  // What is new since the version before.
  std::vector<WorkerInfo> joined = {};
  std::vector<WorkerInfo> left = {};
  std::vector<WorkerInfo> failed = {};
};

// How many references there are, by PyTorch's names.
struct RRefInfo {
  std::uint64_t num_owner_rrefs = 0;      // values here that others may refer to
  std::uint64_t num_pending_users = 0;    // references here that their owners have not confirmed
  std::uint64_t num_pending_futures = 0;  // that wait for a value here
  std::uint64_t num_forks = 0;            // references of others to values here
};

// What a caller does that has too much under way to one worker.
enum class WhenFull {
  kWait,   // until there is room, at most until the call's deadline
  kThrow,  // kResource
};

struct SessionOptions {
  std::string name = {};          // letters, digits and _ : - . at most 127; empty: "worker<rank>"
  std::string method = "env://";  // how workers meet: see convoy/rendezvous.h
  std::optional<int> rank = {};   // instead of what the launcher says
  std::optional<int> size = {};
  // Meet through this instead: `rank` and `size` must be given.
  std::shared_ptr<Store> store = nullptr;
  // kComeAndGo: joins whoever is there; a worker that comes back has a new rank. `size` is not
  // used, `rank` only to find who serves a tcp:// store.
  Members members = Members::kFixed;
  // Of calls that do not say their own; 0: never.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  std::chrono::milliseconds start_timeout = Store::kDefaultTimeout;  // of meeting

  int threads = 16;  // handlers that run at once; those that wait in our calls do not count
  std::size_t most_calls = 8192;                  // under way to one worker
  std::size_t most_bytes = std::size_t{1} << 30;  // likewise
  WhenFull when_full = WhenFull::kWait;
  // Operators that others may call by name ("aten::add"); none by default.
  std::vector<std::string> operators = {};
};

struct CallOptions {
  // Until there is a result; nullopt: the session's; 0: never.
  std::optional<std::chrono::milliseconds> timeout = {};
  // Tensors that are in shared memory already (convoy/share.h) are not copied: the callee gets the
  // same memory, and what it writes there is seen here.
  bool lend = false;
  // Tensors are not written to until the call has ended: rpc_async() then copies large ones once
  // instead of twice. rpc_sync() always does.
  bool stays = false;
};

struct ShutdownOptions {
  // Waits until no worker has calls under way; all workers must call shutdown(). References end: of
  // no value is one left. Without it, calls under way end with kCancelled. Where workers come and
  // go, this worker leaves when it has no calls under way, and nobody refers to values here.
  bool graceful = true;
  // Without `graceful`: others may still refer to values here. Otherwise that is kInvalidArgument
  // ("Leaking RRef"), thrown when the session has ended.
  bool ignore_leaks = false;
  // kTimeout, with who is waited for; the session is still open then. 0: never.
  std::chrono::milliseconds timeout = Store::kDefaultTimeout;
};

class Target;

// A worker among others. Copies are the same session, which ends by shutdown(), or abruptly when
// the last copy goes that is no handler's. Thread-safe.
class Session {
 public:
  // Meets the others; all of them make theirs. A process may have several sessions. Throws
  // kInvalidArgument for a bad name, one that two have ("is not unique", on all of them), and what
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

  // Waits until a worker of this name is there, where workers come and go. kTimeout; 0: the
  // session's.
  WorkerInfo wait_for(const std::string& name, std::chrono::milliseconds timeout = {}) const;
  View view() const;
  // Calls it for each view from now on, one after the other, on the session's threads. The view
  // before the first of them.
  View on_change(std::function<void(const View&)> callback) const;
  // Calls it once, on the session's threads, when that worker has left or is lost; soon, if it is
  // so already. Not when this session ends.
  void on_lost(const To& worker,
               std::function<void(const WorkerInfo&, const Error&)> callback) const;

  // What each of these workers (all, by default) gives, by name. Each of them calls it. kTimeout
  // names those who did not come. `timeout` 0: the session's.
  template <class T>
  std::map<std::string, T> all_gather(const T& value, const std::vector<std::string>& names = {},
                                      std::chrono::milliseconds timeout = {}) const;
  void barrier(const std::vector<std::string>& names = {},
               std::chrono::milliseconds timeout = {}) const;

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
                                                  std::chrono::milliseconds timeout) const;

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
  // Nobody waits for the result any more: the caller gave up, its time is over, or it is gone.
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

namespace detail {

std::uint32_t find_worker(SessionImpl& session, const To& to);
// Ends `core` by what the call gives. `keep` holds it meanwhile; without it, it is on the stack.
struct CallStart {
  const std::shared_ptr<SessionImpl>& session;
  FutureCore& core;
  std::shared_ptr<FutureCore> keep;
  std::uint32_t worker;
  const CallKey& key;
  const CallOptions& options;
  std::uint32_t flags = 0;         // ServedCall's
  const RRefHandle* on = nullptr;  // is kept until the call has ended
};
void start_call(const CallStart& start, const Body& body);
void wait_for_call(SessionImpl& session, FutureCore& core);

template <class Values, class... Arguments>
inline constexpr bool kConvertible = false;
template <class... V, class... Arguments>
  requires(sizeof...(V) == sizeof...(Arguments))
inline constexpr bool kConvertible<std::tuple<V...>, Arguments...> =
    (std::is_convertible_v<Arguments, V> && ...);

// A parameter as it is sent: the argument itself, if that is of its type.
template <class Value, class Argument>
using Passed = std::conditional_t<std::same_as<std::remove_cvref_t<Argument>, Value>, const Value&,
                                  const Value>;

// What a function is called on: nothing, or what a reference refers to.
struct NoObject {
  static constexpr bool kOn = false;
};
struct OnReference {
  static constexpr bool kOn = true;
  // Throws why the reference is of no use.
  explicit OnReference(const RRefHandle& handle);

  std::shared_ptr<SessionImpl> session;
  std::uint32_t worker = 0;
  std::array<std::uint64_t, 3> id{};  // rref::RRefId
  const RRefHandle& reference;
};
// A reference to what a call will make, and that call.
struct Creation {
  // kInvalidArgument after shutdown.
  Creation(const std::shared_ptr<SessionImpl>& session, std::uint32_t worker);
  // The call could not be made.
  void fail(const std::exception_ptr& error) const noexcept;

  RRefHandle reference;
  std::array<std::uint64_t, 4> head{};  // rref::CreationHead
  std::shared_ptr<FutureCore> call;
};

bool same(const RRefHandle& a, const RRefHandle& b);
WorkerInfo owner_of(const RRefHandle& handle);
bool is_owner(const RRefHandle& handle);
bool is_confirmed(const RRefHandle& handle);
std::string describe(const RRefHandle& handle);
std::shared_ptr<SessionImpl> session_of(const RRefHandle& handle);
RRefHandle hold(const std::shared_ptr<SessionImpl>& session, std::shared_ptr<HeldValue> value,
                std::uint64_t type);
HeldValue& local_value(const RRefHandle& handle, const std::type_info& type);
template <class T>
T& local_value(const RRefHandle& handle) {
  return static_cast<HeldValueOf<T>&>(local_value(handle, typeid(T))).value;
}
// Calls end(future, value) when there is a value; an error ends the future.
void when_local(const RRefHandle& handle, const std::shared_ptr<FutureCore>& future,
                void (*end)(void* future, HeldValue& held));
void fetch(const std::shared_ptr<SessionImpl>& session, const RRefHandle& handle,
           const std::shared_ptr<FutureCore>& future, std::uint64_t type,
           const CallOptions& options);
Future<void> when_created(const RRefHandle& handle);
void on_owner_lost(const RRefHandle& handle, std::function<void(const Error&)> callback);

template <auto Function, class On, class... Arguments>
void call(CallStart start, bool sync, const On& on, const Creation* creation,
          Arguments&&... arguments) {
  using Shape = typename RpcFunction<Function>::Shape;
  using Values = std::conditional_t<On::kOn, typename Shape::Rest, typename Shape::Values>;
  static_assert(std::tuple_size_v<Values> == sizeof...(Arguments),
                "rpc: as many arguments as the function has parameters");
  static_assert(kConvertible<Values, Arguments...>,
                "rpc: an argument cannot be converted to the function's parameter");
  const auto mode = start.options.stays || sync ? TensorMode::kStay : TensorMode::kCopy;
  const MessagePeer peer{start.session.get(), start.worker};
  const auto send = [&](const Body& body) { start_call(start, body); };
  [&]<class... V>(std::tuple<V...>*) {
    [&](Passed<V, Arguments>... values) {
      if constexpr (On::kOn) {
        start.flags |= ServedCall::kOnReference;
        start.on = &on.reference;
        if (creation) {
          with_body(&peer, mode, start.options.lend, send, on.id, creation->head, values...);
        } else {
          with_body(&peer, mode, start.options.lend, send, on.id, values...);
        }
      } else if (creation) {
        with_body(&peer, mode, start.options.lend, send, creation->head, values...);
      } else {
        with_body(&peer, mode, start.options.lend, send, values...);
      }
    }(static_cast<Passed<V, Arguments>>(std::forward<Arguments>(arguments))...);
  }(static_cast<Values*>(nullptr));
}

template <auto Function, class On, class... Arguments>
auto call_sync(const std::shared_ptr<SessionImpl>& session, std::uint32_t worker,
               const CallOptions& options, const On& on, Arguments&&... arguments) {
  using Result = typename RpcFunction<Function>::Result;
  FutureState<Result> state;
  call<Function>({session, state, nullptr, worker, key_of<Function>(), options}, true, on, nullptr,
                 std::forward<Arguments>(arguments)...);
  wait_for_call(*session, state);
  if constexpr (!std::is_void_v<Result>) return Result(std::move(state.value()));
}

template <auto Function, class On, class... Arguments>
auto call_async(const std::shared_ptr<SessionImpl>& session, std::uint32_t worker,
                const CallOptions& options, const On& on, Arguments&&... arguments) {
  using Result = typename RpcFunction<Function>::Result;
  auto state = std::make_shared<FutureState<Result>>(session);
  call<Function>({session, *state, state, worker, key_of<Function>(), options}, false, on, nullptr,
                 std::forward<Arguments>(arguments)...);
  return Future<Result>(std::move(state));
}

template <auto Function, class On, class... Arguments>
auto call_remote(const std::shared_ptr<SessionImpl>& session, std::uint32_t worker,
                 const CallOptions& options, const On& on, Arguments&&... arguments) {
  const Creation creation(session, worker);
  try {
    call<Function>({session, *creation.call, creation.call, worker, key_of<Function>(), options,
                    ServedCall::kKeepsResult},
                   false, on, &creation, std::forward<Arguments>(arguments)...);
  } catch (...) {
    creation.fail(std::current_exception());
    throw;
  }
  return RRef<typename RpcFunction<Function>::Result>(creation.reference);
}

}  // namespace detail

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
                                             std::chrono::milliseconds timeout) const {
  std::map<std::string, T> all;
  for (const auto& [name, bytes] : gather_bytes(detail::to_text(value), names, timeout)) {
    all.emplace(name, detail::from_text<T>(bytes));
  }
  return all;
}

}  // namespace convoy::rpc

#include "convoy/rref.h"  // IWYU pragma: export
