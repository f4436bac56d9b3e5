#pragma once

#include <vector>

#include "agent/functions.h"
#include "convoy/rpc_dynamic.h"

namespace convoy::rpc::dynamic {

// A value from what came, which may be anything: kInvalidArgument.
Value take_value(detail::ValueSource& from, const ValueType& type);

// What dynamic::serve() has registered, for an agent.
std::vector<agent::Handler> served_handlers();

}  // namespace convoy::rpc::dynamic
