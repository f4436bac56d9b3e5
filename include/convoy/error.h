#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace convoy {

// What the caller can do about an error.
enum class ErrorKind {
  kInvalidArgument,  // fix the call: bad argument, or ranks disagree about an operation
  kUnsupported,      // not available here: choose another way
  kTimeout,          // a deadline passed
  kPeerLost,         // a peer or a connection is gone: rebuild the group
  kResource,         // out of memory, descriptors, ...: free some or raise the limit
  kRemote,           // the other side's handler threw
  kInternal,         // a bug in this library
  kCancelled,        // cancelled by a call on this side
};

// "invalid argument", "timeout", ...
std::string_view to_string(ErrorKind kind);

// The exception type of this library; more specific errors derive from it. what() is complete:
// operation, who, what happened, and a hint. Immutable; may be copied between threads.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}

  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace convoy
