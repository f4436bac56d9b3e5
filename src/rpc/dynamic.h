#pragma once

#include <vector>

#include "agent/functions.h"

namespace convoy::rpc::dynamic {

// What dynamic::serve() has registered, for an agent.
std::vector<agent::Handler> served_handlers();

}  // namespace convoy::rpc::dynamic
