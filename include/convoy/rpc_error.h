#pragma once

#include <string>

#include "convoy/error.h"

namespace convoy::rpc {

// How a call went wrong because of the worker that was called, or on it. what() is complete by
// itself: function, worker, cause, and the text of what the function threw.
class RemoteError : public Error {
 public:
  RemoteError(ErrorKind kind, const std::string& message, std::string worker,
              std::string remote_type);
  ~RemoteError() override;  // in the library: what is thrown in one library is caught in another

  // Its name.
  const std::string& worker() const noexcept { return worker_; }
  // The type of what the function threw ("std::runtime_error"); empty if it was not the function.
  const std::string& remote_type() const noexcept { return remote_type_; }

 private:
  std::string worker_;
  std::string remote_type_;
};

}  // namespace convoy::rpc
