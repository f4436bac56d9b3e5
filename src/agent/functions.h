#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "agent/request.h"

namespace convoy::agent {

// What a function is called by: other processes know it by all three.
struct FunctionKey {
  std::string_view name;
  std::string_view signature;  // for errors
  std::uint64_t hash = 0;      // of the signature
};

// One number for each function that this process calls or runs; they count from 0 and are never
// given back. The same key has the same number. Thread-safe.
using FunctionId = std::uint32_t;
FunctionId declare_function(const FunctionKey& key);
// Views live as long as the process.
FunctionKey declared_function(FunctionId id);

// A function that others may call.
struct Handler {
  FunctionKey key;
  // Answers, or keeps the request and answers later. Must not throw.
  void (*run)(void* data, RequestRef request) noexcept = nullptr;
  void* data = nullptr;
};

}  // namespace convoy::agent
