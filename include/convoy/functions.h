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

// The functions that other processes can ask this one to run. spawn() and ProcessPool register
// those that they are used with by themselves, before main, in every process of the program.
namespace convoy {

// What the registry tells of a function.
struct FunctionInfo {
  std::string name;       // "sim::act(int, convoy::Slots const&, double)"
  std::string signature;  // "void (int, convoy::Slots, double)": results and parameters as values
  std::uint64_t signature_hash = 0;
  // Whether any peer may call it by name. Being used with spawn() or ProcessPool does not set this:
  // those run only what their own parent, the same program, asks for.
  bool exported = false;
};
// All that this process knows, by name. Thread-safe.
std::vector<FunctionInfo> registered_functions();

namespace detail {

// Runs a function with arguments that it takes from a message; what it returned.
using Runner = share::Message (*)(int index, share::ValueReader& arguments);

enum class FunctionUse {
  kProcess,  // a spawned process runs it; its first parameter is the index
  kItem,     // a worker of a pool runs it
};

struct FunctionEntry : FunctionInfo {
  const void* identity = nullptr;  // one address for each function
  Runner run_process = nullptr;
  Runner run_item = nullptr;
  // Of functions that are called by other workers (convoy/rpc.h): a name without parameters, what
  // their values are made of with its hash, and what runs them.
  std::string call_name = {};
  std::string call_signature = {};
  std::uint64_t call_hash = 0;
  void (*run_call)(void* call) noexcept = nullptr;
};

// Finds or makes the entry of a function and gives it one more way to be run. The name comes from
// `type`, a type's mangled name that holds the function's. Functions of one name in several files
// of a program (static, or in anonymous namespaces) are "name", "name#2" and so on, in the order in
// which they register: the same in every process that runs the same file.
const FunctionEntry& register_function(const void* identity, const std::type_info& type,
                                       const std::type_info& signature, FunctionUse use,
                                       Runner runner);

// A function that is called by other workers.
struct CallRegistration {
  const void* identity = nullptr;
  const std::type_info* type = nullptr;  // as above
  std::string signature = {};
  bool lambda = false;  // then its name is the text that stands for it in this scope
  std::string_view text = {};
  const std::type_info* scope = nullptr;
  void (*run)(void* call) noexcept = nullptr;
};
// Lets any peer call it. True, for initializers.
bool export_function(const CallRegistration& function);
// Of one that this process wants to call, exported here or not. kInvalidArgument for a lambda that
// is not.
const FunctionEntry& call_entry(const CallRegistration& function);
// Those that peers may call.
std::vector<const FunctionEntry*> exported_functions();

// A message that asks for a function: its name and signature, arguments follow.
share::Message function_request(const FunctionEntry& entry);
// Runs what such a message asks for. kInvalidArgument: this process has no such function, or one
// of another signature; the text has both.
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
