#pragma once

#include <vector>

#include "agent/functions.h"

namespace convoy::rpc::detail {

// What other workers may call of this process, for an agent.
std::vector<agent::Handler> exported_handlers();

}  // namespace convoy::rpc::detail
