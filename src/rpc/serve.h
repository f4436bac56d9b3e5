#pragma once

#include <string>
#include <vector>

#include "agent/functions.h"
#include "convoy/error.h"

namespace convoy::rpc::detail {

// Thrown instead of what a function throws: the call does not fit. Of kind kInvalidArgument.
class Refusal : public Error {
 public:
  explicit Refusal(const std::string& text) : Error(ErrorKind::kInvalidArgument, text) {}
};

// What other workers may call of this process, for an agent.
std::vector<agent::Handler> exported_handlers();

}  // namespace convoy::rpc::detail
