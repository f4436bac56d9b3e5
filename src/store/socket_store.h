#pragma once

#include <memory>

#include "convoy/store.h"
#include "os/socket.h"

namespace convoy {

// A client of a StoreServer over a connected socket.
std::shared_ptr<Store> make_socket_store(Socket socket);

}  // namespace convoy
