#pragma once

#include <memory>

#include "convoy/deadline.h"
#include "convoy/store.h"
#include "group/launch_environment.h"

namespace convoy {

// Torch's TCPStore, served by this process at exactly the given address (torch itself would listen
// on all interfaces). It has no authentication: whoever reaches the port can read and write.
std::shared_ptr<Store> serve_tcp_store(const Endpoint& endpoint, const Deadline& deadline);
// A client of one; waits until somebody listens there, and for a name that cannot be resolved yet.
std::shared_ptr<Store> connect_tcp_store(const Endpoint& endpoint, const Deadline& deadline);

}  // namespace convoy
