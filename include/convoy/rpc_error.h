#pragma once

#include <string>

#include "convoy/error.h"

namespace convoy::rpc {

// An error of a call that the called worker caused, or that happened on it. what() is complete by
// itself: function, worker, cause, and the text of the exception if the function threw.
class RemoteError : public Error {
 public:
  RemoteError(ErrorKind kind, const std::string& message, std::string worker,
              std::string remote_type);
  ~RemoteError() override;  // defined in the library: shared libraries then agree on the type

  // The name of the worker.
  const std::string& worker() const noexcept { return worker_; }
  // The type of the exception that the function threw ("std::runtime_error"). Empty for other
  // errors.
  const std::string& remote_type() const noexcept { return remote_type_; }

 private:
  std::string worker_;
  std::string remote_type_;
};

}  // namespace convoy::rpc
