#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <vector>

#include "convoy/share.h"
#include "convoy/values.h"

// The registry of functions that other processes can ask this one to run. Functions that are used
// with spawn() and ProcessPool are registered automatically, before main, in every process of the
// program.
namespace convoy {

// A registered function.
struct FunctionInfo {
  std::string name;       // "sim::act(int, convoy::share::Slots const&, double)"
  std::string signature;  // "void (int, convoy::share::Slots, double)": with all types by value
  std::uint64_t signature_hash = 0;
  // Whether any peer may call it by name. Use with spawn() or ProcessPool does not set this: there
  // only the parent, the same program, asks for it.
  bool exported = false;
};
// All functions that this process knows, sorted by name. Thread-safe.
std::vector<FunctionInfo> registered_functions();

namespace detail {

// Runs a function with arguments from a message; returns its result.
using Runner = share::Message (*)(int index, share::ValueReader& arguments);

enum class FunctionUse {
  kProcess,  // a spawned process runs it; its first parameter is the process index
  kItem,     // a worker of a ProcessPool runs it
};

struct FunctionEntry : FunctionInfo {
  const void* identity = nullptr;  // a unique address for each function
  Runner run_process = nullptr;
  Runner run_item = nullptr;
  // For functions that are called over RPC (convoy/rpc.h): the name without parameters, the
  // signature of their values and its hash, and the code that runs the call.
  std::string call_name = {};
  std::string call_signature = {};
  std::uint64_t call_hash = 0;
  void (*run_call)(void* call) noexcept = nullptr;
};

// Finds or creates the entry of a function, and adds `runner` to it for `use`. The name comes from
// `type`, whose mangled name contains that of the function. If functions in several files of a
// program have the same name (static, or in anonymous namespaces), they are called "name", "name#2"
// and so on, in the order of registration. That order is the same in every process that runs the
// same executable. Thread-safe.
const FunctionEntry& register_function(const void* identity, const std::type_info& type,
                                       const std::type_info& signature, FunctionUse use,
                                       Runner runner);

// A function that is called over RPC.
struct CallRegistration {
  const void* identity = nullptr;
  const std::type_info* type = nullptr;  // as in register_function()
  std::string signature = {};
  bool lambda = false;  // if true, its name is `text`, in the namespace of `scope`
  std::string_view text = {};
  const std::type_info* scope = nullptr;
  void (*run)(void* call) noexcept = nullptr;
};
// Allows any peer to call the function. Returns true, so that it can initialise a variable.
bool export_function(const CallRegistration& function);
// The entry of a function that this process calls, whether it is exported here or not. Throws
// kInvalidArgument for a lambda that is not registered (CONVOY_RPC).
const FunctionEntry& call_entry(const CallRegistration& function);
// The functions that peers may call.
std::vector<const FunctionEntry*> exported_functions();

// A message that requests a function: its name and signature. Arguments are appended.
share::Message function_request(const FunctionEntry& entry);
// Runs the requested function. Throws kInvalidArgument if this process has no such function, or if
// its signature differs; the text has both signatures.
share::Message run_request(FunctionUse use, int index, const share::Message& request);

template <class T>
struct Signature;
template <class R, class... Parameters>
struct Signature<std::function<R(Parameters...)>> {
  using Result = R;
  using Values = std::tuple<std::decay_t<Parameters>...>;
  using Type = std::decay_t<R>(std::decay_t<Parameters>...);
};
template <auto Function>
using SignatureOf = Signature<decltype(std::function{Function})>;

template <auto Function>
struct FunctionIdentity {
  static constexpr char kHere = 0;  // its address is the identity
};

template <auto Function>
const FunctionEntry& register_function(FunctionUse use, Runner runner) {
  return register_function(&FunctionIdentity<Function>::kHere, typeid(FunctionIdentity<Function>),
                           typeid(typename SignatureOf<Function>::Type), use, runner);
}

}  // namespace detail
}  // namespace convoy
