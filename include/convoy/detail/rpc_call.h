#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "convoy/detail/rpc_served.h"
#include "convoy/detail/rpc_values.h"
#include "convoy/future.h"
#include "convoy/rpc_error.h"
#include "convoy/rpc_function.h"
#include "convoy/rpc_options.h"

// The caller's side of calls. For convoy/rpc.h and convoy/rref.h; nothing here is for direct use.
namespace convoy::rpc::detail {

std::uint32_t find_worker(SessionImpl& session, const To& to);
// A call whose result ends `core`. `keep` keeps `core` alive until then; nullptr if `core` is on
// the caller's stack.
struct CallStart {
  const std::shared_ptr<SessionImpl>& session;
  FutureCore& core;
  std::shared_ptr<FutureCore> keep;
  std::uint32_t worker;
  const CallKey& key;
  const CallOptions& options;
  std::uint32_t flags = 0;         // those of ServedCall
  const RRefHandle* on = nullptr;  // kept alive until the call has ended
};
void start_call(const CallStart& start, const Body& body);
void wait_for_call(SessionImpl& session, FutureCore& core);

template <class Values, class... Arguments>
inline constexpr bool kConvertible = false;
template <class... V, class... Arguments>
  requires(sizeof...(V) == sizeof...(Arguments))
inline constexpr bool kConvertible<std::tuple<V...>, Arguments...> =
    (std::is_convertible_v<Arguments, V> && ...);

// How an argument is passed on to be encoded: itself if it has the parameter's type, else
// converted.
template <class Value, class Argument>
using Passed = std::conditional_t<std::same_as<std::remove_cvref_t<Argument>, Value>, const Value&,
                                  const Value>;

// What a function is called on: no object, or the value of a reference.
struct NoObject {
  static constexpr bool kOn = false;
};
struct OnReference {
  static constexpr bool kOn = true;
  // Throws if the reference cannot be used.
  explicit OnReference(const RRefHandle& handle);

  std::shared_ptr<SessionImpl> session;
  std::uint32_t worker = 0;
  std::array<std::uint64_t, 3> id{};  // rref::RRefId
  const RRefHandle& reference;
};
// A reference to a value that a call will make, with that call.
struct Creation {
  // Throws kInvalidArgument after shutdown.
  Creation(const std::shared_ptr<SessionImpl>& session, std::uint32_t worker);
  // Ends the creation with an error, if the call could not be sent.
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
// Calls end(future, value) when the value is there. If its creation fails or the options' timeout
// passes, the future ends with an error instead.
void when_local(const RRefHandle& handle, const std::shared_ptr<FutureCore>& future,
                const CallOptions& options, void (*end)(void* future, HeldValue& held));
// Fetches the value of a reference of another worker, which must be usable (session_of). `keep` is
// as in CallStart.
void fetch(const std::shared_ptr<SessionImpl>& session, const RRefHandle& handle,
           FutureCore& future, std::shared_ptr<FutureCore> keep, std::uint64_t type,
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
    [&](Passed<V, Arguments>... values) {  // NOLINT(performance-unnecessary-value-param)
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

}  // namespace convoy::rpc::detail
