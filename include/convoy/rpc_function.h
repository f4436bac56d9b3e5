#pragma once

#include <cstdint>
#include <string_view>
#include <typeinfo>
#include <utility>

#include "convoy/detail/rpc_serving.h"
#include "convoy/detail/rpc_shape.h"
#include "convoy/functions.h"

// Functions that other workers may call.
//
//   at::Tensor my_add(at::Tensor a, at::Tensor b) { return a + b; }
//   CONVOY_RPC(my_add);
//
// Write it after the function, in its namespace, in a file that every worker links. It takes free
// functions, static member functions, other member functions (CONVOY_RPC(&Model::forward): the
// object is the first argument if its type can be passed), and constexpr lambdas without captures.
// If a function returns a Future<T>, for example as a coroutine, callers get a T.
#define CONVOY_RPC(...) CONVOY_RPC_NUMBERED(__COUNTER__, __VA_ARGS__)

#define CONVOY_RPC_NUMBERED(number, ...) CONVOY_RPC_EXPORT(number, __VA_ARGS__)
#define CONVOY_RPC_EXPORT(number, ...)                                                       \
  namespace {                                                                                \
  struct ConvoyRpcScope##number {};                                                          \
  [[maybe_unused]] const bool kConvoyRpc##number =                                           \
      ::convoy::rpc::detail::export_function<(__VA_ARGS__)>(#__VA_ARGS__,                    \
                                                            typeid(ConvoyRpcScope##number)); \
  }                                                                                          \
  static_assert(true)

namespace convoy::rpc::detail {

// What a caller needs of a function.
struct CallKey {
  const convoy::detail::FunctionEntry* entry = nullptr;
  std::uint32_t id = 0;  // its number in the call engine
};
CallKey call_key(const convoy::detail::CallRegistration& registration);

template <auto Function>
convoy::detail::CallRegistration registration() {
  using Rpc = RpcFunction<Function>;
  convoy::detail::CallRegistration what;
  what.identity = &convoy::detail::FunctionIdentity<Function>::kHere;
  what.type = &typeid(convoy::detail::FunctionIdentity<Function>);
  what.lambda = Rpc::kLambda;
  what.signature = std::move(Rpc::signature().text());
  return what;
}

template <auto Function>
const CallKey& key_of() {
  static const CallKey key = call_key(registration<Function>());
  return key;
}

template <auto Function>
bool export_function(std::string_view text, const std::type_info& scope) {
  using Rpc = RpcFunction<Function>;
  auto what = registration<Function>();
  what.text = text;
  what.scope = &scope;
  // Functions of an object that cannot be passed are called on references to it.
  if constexpr (is_passable<typename Rpc::Values>() ||
                (Rpc::kHasObject && is_passable<typename Rpc::Rest>())) {
    what.run = &serve<Function>;
  }
  return convoy::detail::export_function(what);
}

}  // namespace convoy::rpc::detail
