#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace convoy {

// What the caller can do about an error.
enum class ErrorKind {
  kInvalidArgument,  // fix the call: bad argument, or ranks that disagree about an operation
  kUnsupported,      // choose another way
  kTimeout,          // a deadline passed
  kPeerLost,         // a peer or a connection is gone: rebuild the group
  kResource,         // memory, descriptors: free some or raise the limit
  kRemote,           // the other side's handler threw
  kInternal,         // a bug of ours
  kCancelled,        // somebody on this side asked for it to end
};

// "invalid argument", "timeout", ...
std::string_view to_string(ErrorKind kind);

// The one exception of this library. what() is complete by itself: operation, who, what, hint.
// Immutable; may be copied between threads.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}

  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace convoy
