#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "convoy/deadline.h"
#include "convoy/rpc.h"
#include "convoy/tensors_in.h"

// References to values that live on other workers.
//
//   auto model = rpc.remote<make_model>("worker1", config);  // RRef<Model>, at once
//   auto y = model.rpc_sync<&ModelImpl::forward>(x);         // runs at the owner
//   auto mine = rpc.rref(tensor);                            // RRef<at::Tensor> of a local value
//   auto copy = weights.to_here();
//   auto& here = weights.local_value();                      // at the owner
//
// The owner keeps the value as long as any worker has a reference to it. See
// docs/reference/rref.md.
namespace convoy::rpc {

template <class T>
class RRefTarget;

namespace detail {
[[noreturn]] void fail_backward_of_user(const RRefHandle& handle);
}

// A reference-counted handle to a value on another worker. Copies are the same reference. Arguments
// and results of calls may hold references, also in containers and structs. A reference does not
// keep its session alive, and may outlive it. Thread-safe.
//
// Every use of the value throws the error of its creation if that failed, kPeerLost if the owner is
// gone, and kInvalidArgument if the session has ended ("deleted") or the RRef is empty.
template <class T>
class RRef {
 public:
  using Value = T;

  RRef() = default;  // none
  explicit RRef(detail::RRefHandle handle) : handle_(std::move(handle)) {}
  explicit operator bool() const { return handle_ != nullptr; }
  friend bool operator==(const RRef& a, const RRef& b) {
    return detail::same(a.handle_, b.handle_);
  }

  WorkerInfo owner() const { return detail::owner_of(handle_); }
  std::string owner_name() const { return owner().name; }
  bool is_owner() const { return detail::is_owner(handle_); }
  // True once the owner has counted this reference.
  bool confirmed_by_owner() const { return detail::is_confirmed(handle_); }
  // "RRef (worker 1, #7 of worker 0)"
  std::string to_string() const { return detail::describe(handle_); }

  // A copy of the value. Blocks until the value is there, and throws kTimeout. At the owner it is
  // an ordinary C++ copy (for tensors: the same memory).
  T to_here() const { return with({}).to_here(); }
  T to_here(const Timeout& timeout) const { return with({.timeout = timeout}).to_here(); }
  Future<T> to_here_async() const { return with({}).to_here_async(); }
  // The value itself, at its owner. Blocks until it is there; throws kTimeout after the session's
  // timeout. Throws kInvalidArgument on other workers.
  detail::Stored<T>& local_value() const { return detail::local_value<detail::Stored<T>>(handle_); }
  // At the owner, and on the worker that created it: done when the value was made or could not be.
  // On a worker that got it in a message: done when the owner knows of the reference; the value may
  // not be there yet.
  Future<void> created() const { return detail::when_created(handle_); }

  // Calls a function of the value, at its owner. It must have CONVOY_RPC and be a member function
  // of T, or of what T points to (a module's holder, a std::shared_ptr). Throws as
  // Session::rpc_sync.
  template <auto Function, class... Arguments>
  auto rpc_sync(Arguments&&... arguments) const {
    return with({}).template rpc_sync<Function>(std::forward<Arguments>(arguments)...);
  }
  template <auto Function, class... Arguments>
  auto rpc_async(Arguments&&... arguments) const {
    return with({}).template rpc_async<Function>(std::forward<Arguments>(arguments)...);
  }
  // Returns a reference to the result, which stays at the owner. Does not block.
  template <auto Function, class... Arguments>
  auto remote(Arguments&&... arguments) const {
    return with({}).template remote<Function>(std::forward<Arguments>(arguments)...);
  }
  // The same with options: model.with({.timeout = 5s}).rpc_sync<&ModelImpl::forward>(x).
  RRefTarget<T> with(const CallOptions& options) const { return {handle_, options}; }

  // For a reference to a tensor. Without a context: calls backward() of the tensor, at its owner
  // only. With one (convoy/autograd.h; BackwardOptions may follow): runs a distributed backward
  // pass with the tensor as root, at its owner.
  void backward() const {
    static_assert(std::same_as<T, at::Tensor>, "RRef should contain a tensor for .backward()");
    if (!is_owner()) detail::fail_backward_of_user(handle_);
    local_value().backward();
  }
  template <class Context, class... Options>
  void backward(const Context& context, const Options&... options) const {
    static_assert(std::same_as<T, at::Tensor>, "RRef should contain a tensor for .backward()");
    backward_from(context, *this, options...);
  }

  // Calls `callback` once, on the session's threads, when the owner has left or is lost or the
  // session ends; soon if it already has. Not called at the owner, after the reference is gone, or
  // if the value could not be made (created() tells that).
  void on_lost(std::function<void(const Error&)> callback) const {
    detail::on_owner_lost(handle_, std::move(callback));
  }

  const detail::RRefHandle& handle() const { return handle_; }

 private:
  detail::RRefHandle handle_;
};

// The tensors of a value on this worker: a module may return a reference (convoy/tensors_in.h). A
// reference does not own its tensors: copies refer to the same ones.
template <class T, class Function>
  requires(!std::same_as<std::remove_cvref_t<Function>, convoy::detail::NoTensors>)
void for_each_tensor(RRef<T>& reference, Function&& function) {
  if (reference && reference.is_owner()) {
    convoy::for_each_tensor(reference.local_value(), std::forward<Function>(function));
  }
}

// A reference with options for the calls on it.
template <class T>
class RRefTarget {
 public:
  RRefTarget(detail::RRefHandle handle, const CallOptions& options)
      : handle_(std::move(handle)), options_(options) {}

  T to_here() const {
    if (detail::is_owner(handle_)) return to_here_async().wait();
    static_assert(detail::is_passable<detail::Stored<T>>(),
                  "to_here: a value of this type cannot be passed; call functions on it instead");
    const auto session = detail::session_of(handle_);
    detail::FutureState<T> state;
    detail::fetch(session, handle_, state, nullptr, detail::type_number<detail::Stored<T>>(),
                  options_);
    detail::wait_for_call(*session, state);
    if constexpr (!std::is_void_v<T>) return T(std::move(state.value()));
  }
  Future<T> to_here_async() const {
    static_assert(detail::is_passable<detail::Stored<T>>(),
                  "to_here: a value of this type cannot be passed; call functions on it instead");
    const auto session = detail::session_of(handle_);
    auto state = std::make_shared<detail::FutureState<T>>(session);
    if (detail::is_owner(handle_)) {
      detail::when_local(handle_, state, options_, [](void* future, detail::HeldValue& held) {
        auto& result = *static_cast<detail::FutureState<T>*>(future);
        try {
          // The sender of the reference may have told another type.
          const std::type_info& wanted = typeid(detail::Stored<T>);
          if (held.type() != wanted) detail::fail_object(&held.type(), wanted);
        } catch (...) {
          return result.end(std::current_exception());
        }
        result.end_with(static_cast<detail::HeldValueOf<detail::Stored<T>>&>(held).value);
      });
    } else {
      detail::fetch(session, handle_, *state, state, detail::type_number<detail::Stored<T>>(),
                    options_);
    }
    return Future<T>(std::move(state));
  }

  template <auto Function, class... Arguments>
  auto rpc_sync(Arguments&&... arguments) const {
    check<Function>();
    const detail::OnReference on(handle_);
    return detail::call_sync<Function>(on.session, on.worker, options_, on,
                                       std::forward<Arguments>(arguments)...);
  }
  template <auto Function, class... Arguments>
  auto rpc_async(Arguments&&... arguments) const {
    check<Function>();
    const detail::OnReference on(handle_);
    return detail::call_async<Function>(on.session, on.worker, options_, on,
                                        std::forward<Arguments>(arguments)...);
  }
  template <auto Function, class... Arguments>
  auto remote(Arguments&&... arguments) const {
    check<Function>();
    const detail::OnReference on(handle_);
    return detail::call_remote<Function>(on.session, on.worker, options_, on,
                                         std::forward<Arguments>(arguments)...);
  }

 private:
  template <auto Function>
  static constexpr void check() {
    using Object = typename detail::RpcFunction<Function>::Object;
    static_assert(!std::is_void_v<Object>, "a member function of what the reference refers to");
    if constexpr (detail::PointsTo<T>) {
      using Pointee = std::remove_cvref_t<decltype(*std::declval<T&>())>;
      static_assert(std::derived_from<T, Object> || std::derived_from<Pointee, Object>,
                    "the function is not one of what the reference refers to");
    } else {
      static_assert(std::derived_from<T, Object>,
                    "the function is not one of what the reference refers to");
    }
  }

  detail::RRefHandle handle_;
  CallOptions options_;
};

// A function that makes a T, for remote(): CONVOY_RPC(rpc::make<Counter, int>), then
// rpc.remote<rpc::make<Counter, int>>("worker1", 7).
template <class T, class... Arguments>
T make(Arguments... arguments) {
  return T(std::move(arguments)...);
}

// ----------------------------------------------------------------------------------------------

template <auto Function, class... Arguments>
auto Session::remote(const To& to, Arguments&&... arguments) const {
  return detail::call_remote<Function>(impl_, detail::find_worker(*impl_, to), {},
                                       detail::NoObject(), std::forward<Arguments>(arguments)...);
}
template <auto Function, class... Arguments>
auto Target::remote(Arguments&&... arguments) const {
  return detail::call_remote<Function>(session_.impl_, worker_, options_, detail::NoObject(),
                                       std::forward<Arguments>(arguments)...);
}
template <class T>
auto Session::rref(T&& value) const {
  using Value = std::decay_t<T>;
  return RRef<Value>(
      detail::hold(impl_, std::make_shared<detail::HeldValueOf<Value>>(std::forward<T>(value)),
                   detail::type_number<Value>()));
}

}  // namespace convoy::rpc

namespace convoy {
template <class T>
using RRef = rpc::RRef<T>;
}  // namespace convoy
