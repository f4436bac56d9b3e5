#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <string>
#include <vector>

#include "agent/functions.h"
#include "convoy/error.h"

namespace convoy::rpc::detail {

struct Body;

// Thrown instead of what a function throws: the call does not fit. Of kind kInvalidArgument.
class Refusal : public Error {
 public:
  explicit Refusal(const std::string& text) : Error(ErrorKind::kInvalidArgument, text) {}
};

// Thrown in a handler instead of what was thrown elsewhere: its kind, type and text.
class HandlerFailure : public Error {
 public:
  explicit HandlerFailure(const agent::Failure& failure)
      : Error(failure.kind, failure.text), type(failure.remote_type) {}

  std::string type;
};

struct Thrown {
  std::string type;
  std::string text;
  ErrorKind kind = ErrorKind::kRemote;
};
Thrown describe_thrown(const std::exception_ptr& error);

// The session may have ended: nothing of it is asked for.
void fail_request(agent::Request& request, const std::exception_ptr& error) noexcept;
void reply_to(agent::Request& request, const Body& body);
// The arguments came with a context: it is the request's from now on. For on_trailer().
void take_context(void* data, const std::vector<at::Tensor>& with_grad, const std::byte* bytes,
                  std::size_t count);

// What other workers may call of this process, for an agent.
std::vector<agent::Handler> exported_handlers();

}  // namespace convoy::rpc::detail
