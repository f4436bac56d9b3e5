#include "convoy/functions.h"

#include <cxxabi.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <string_view>

#include "base/error.h"
#include "base/guarded.h"
#include "base/quote.h"

namespace convoy {
namespace {

using detail::FunctionEntry;
using detail::FunctionUse;
using detail::Runner;
using share::Message;

// Entries stay where they are: callers keep references.
using Functions = std::map<std::string, FunctionEntry, std::less<>>;
Guarded<Functions>& functions() {
  // Used before main and never destroyed: programs may register until they end.
  static auto* const known = new Guarded<Functions>;
  return *known;
}

std::string demangled(const char* name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(name, nullptr, nullptr, &status), std::free);
  return text ? text.get() : name;
}

// Of "convoy::detail::FunctionIdentity<&(act(int))>": "act(int)"; "<&act>", of static ones: "act".
std::string name_of_function(const std::type_info& identity) {
  std::string text = demangled(identity.name());
  const std::size_t begin = text.find('<');
  const std::size_t end = text.rfind('>');
  if (begin == std::string::npos || end == std::string::npos || end < begin) return text;
  text = text.substr(begin + 1, end - begin - 1);
  if (text.starts_with("&(") && text.ends_with(')')) return text.substr(2, text.size() - 3);
  return text.starts_with('&') ? text.substr(1) : text;
}

// FNV-1a. Of the mangled name, which compilers agree on; demangled texts differ in blanks.
std::uint64_t hash_of(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }
  return hash;
}

FunctionEntry& entry_for(Functions& known, const void* identity, const std::string& name) {
  std::string unique = name;
  for (int n = 2;; ++n) {
    FunctionEntry& entry = known[unique];
    if (entry.identity == nullptr || entry.identity == identity) {
      entry.identity = identity;
      entry.name = unique;
      return entry;
    }
    unique = name + "#" + std::to_string(n);
  }
}

// The entry of a function that has one already, under whatever name.
FunctionEntry* entry_of(Functions& known, const void* identity) {
  for (auto& [name, entry] : known) {
    if (entry.identity == identity) return &entry;
  }
  return nullptr;
}

// Of "sim::Net::forward(at::Tensor) const": "sim::Net::forward".
std::string without_parameters(std::string name) {
  // What the demangler says of functions that return strings is no part of their name.
  constexpr std::string_view kTag = "[abi:cxx11]";
  for (auto at = name.find(kTag); at != std::string::npos; at = name.find(kTag)) {
    name.erase(at, kTag.size());
  }
  if (name.ends_with(" const")) name.resize(name.size() - 6);
  if (!name.ends_with(')')) return name;
  int depth = 0;
  for (std::size_t i = name.size(); i-- > 0;) {
    depth += name[i] == ')' ? 1 : name[i] == '(' ? -1 : 0;
    if (depth == 0) return i == 0 ? name : name.substr(0, i);
  }
  return name;
}

// A lambda's name is that of its variable, with the namespace that the type `scope` is in.
std::string name_of_lambda(std::string_view text, const std::type_info& scope) {
  std::string name = demangled(scope.name());
  const std::size_t end = name.rfind("::");
  name = end == std::string::npos ? "" : name.substr(0, end + 2);
  constexpr std::string_view kUnnamed = "(anonymous namespace)::";  // that of the macro itself
  if (name.ends_with(kUnnamed)) name.resize(name.size() - kUnnamed.size());
  return name + std::string(text);
}

FunctionEntry& enter_call(Functions& known, const detail::CallRegistration& function) {
  FunctionEntry* entry = entry_of(known, function.identity);
  if (!entry || entry->call_name.empty()) {
    const std::string name = function.lambda ? name_of_lambda(function.text, *function.scope)
                                             : name_of_function(*function.type);
    if (!entry) entry = &entry_for(known, function.identity, name);
    entry->call_name = function.lambda ? name : without_parameters(name);
    entry->call_signature = function.signature;
    entry->call_hash = hash_of(function.signature);
    if (entry->signature.empty()) {
      entry->signature = entry->call_signature;
      entry->signature_hash = entry->call_hash;
    }
  }
  return *entry;
}

Runner runner_of(const FunctionEntry& entry, FunctionUse use) {
  return use == FunctionUse::kProcess ? entry.run_process : entry.run_item;
}

const FunctionEntry& find_function(FunctionUse use, const std::string& name) {
  auto known = functions().lock();
  const auto found = known->find(name);
  if (found == known->end() || runner_of(found->second, use) == nullptr) {
    fail(ErrorKind::kInvalidArgument, "this program has no function ", in_quotes(name, 300),
         ": it is a different program from the one that asks for it, or the function is in a "
         "library that was loaded after main began");
  }
  return found->second;
}

}  // namespace

std::vector<FunctionInfo> registered_functions() {
  std::vector<FunctionInfo> all;
  auto known = functions().lock();
  for (const auto& [name, entry] : *known) all.push_back(entry);
  return all;
}

namespace detail {

const FunctionEntry& register_function(const void* identity, const std::type_info& type,
                                       const std::type_info& signature, FunctionUse use,
                                       Runner runner) {
  auto known = functions().lock();
  FunctionEntry* const found = entry_of(*known, identity);
  FunctionEntry& entry = found ? *found : entry_for(*known, identity, name_of_function(type));
  entry.signature = demangled(signature.name());
  entry.signature_hash = hash_of(signature.name());
  (use == FunctionUse::kProcess ? entry.run_process : entry.run_item) = runner;
  return entry;
}

bool export_function(const CallRegistration& function) {
  auto known = functions().lock();
  FunctionEntry& entry = enter_call(*known, function);
  entry.exported = true;
  entry.run_call = function.run;
  return true;
}

const FunctionEntry& call_entry(const CallRegistration& function) {
  auto known = functions().lock();
  if (const FunctionEntry* const entry = entry_of(*known, function.identity);
      function.lambda && (!entry || entry->call_name.empty())) {
    fail(ErrorKind::kInvalidArgument,
         "rpc: a lambda must be registered with CONVOY_RPC before it is called");
  }
  return enter_call(*known, function);
}

std::vector<const FunctionEntry*> exported_functions() {
  std::vector<const FunctionEntry*> all;
  auto known = functions().lock();
  for (const auto& [name, entry] : *known) {
    if (entry.exported) all.push_back(&entry);
  }
  return all;
}

Message function_request(const FunctionEntry& entry) {
  return Message{entry.name, static_cast<std::int64_t>(entry.signature_hash), entry.signature};
}

Message run_request(FunctionUse use, int index, const Message& request) {
  share::ValueReader values(request);
  const FunctionEntry& entry = find_function(use, values.take<std::string>());
  const auto hash = static_cast<std::uint64_t>(values.take<std::int64_t>());
  const auto signature = values.take<std::string>();
  if (hash != entry.signature_hash) {
    fail(ErrorKind::kInvalidArgument, "function ", in_quotes(entry.name, 300), " is ",
         in_quotes(entry.signature, 300), " here and ", in_quotes(signature, 300),
         " in the process that asks for it: the two were built from different sources");
  }
  return runner_of(entry, use)(index, values);
}

}  // namespace detail
}  // namespace convoy
