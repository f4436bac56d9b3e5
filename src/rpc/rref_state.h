#pragma once

#include <memory>
#include <utility>

#include "convoy/rpc.h"
#include "rpc/session_impl.h"
#include "rref/refs.h"

namespace convoy::rpc::detail {

// A reference as users hold it.
class RRefState {
 public:
  RRefState(rref::Ref chosen, std::weak_ptr<SessionImpl> of)
      : ref(std::move(chosen)), session(std::move(of)) {}

  const rref::Ref ref;
  const std::weak_ptr<SessionImpl> session;
};

// References as they lie in memory.
template <class To, class From>
To as_bytes_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  static_assert(std::is_trivially_copyable_v<To> && std::is_trivially_copyable_v<From>);
  To to;
  std::memcpy(static_cast<void*>(&to), &from, sizeof to);
  return to;
}

std::exception_ptr error_of(const agent::Failure& failure);
agent::Failure failure_of(const std::exception_ptr& error, const std::string& worker);

// The callee's side of to_here().
agent::Handler fetch_handler();

}  // namespace convoy::rpc::detail
