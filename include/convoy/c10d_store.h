#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>

#include "convoy/store.h"

namespace c10d {
class Store;
}

namespace convoy {

// Wraps our store as a torch store, so that foreign backends and Python can use it for rendezvous.
// As thread-safe as the store itself. clone() shares the connection. Its methods throw torch's
// exceptions: c10::DistStoreError at a deadline, c10::DistNetworkError for everything else. Throws
// kInvalidArgument if `store` is nullptr.
c10::intrusive_ptr<c10d::Store> to_c10d(std::shared_ptr<Store> store);

// Wraps a torch store (TCPStore, FileStore, HashStore, ...) as ours. Unwraps what to_c10d made:
// returns the original store. Thread-safe: calls are serialised. Torch's exceptions become Error
// (kTimeout, kPeerLost). watch() polls, because torch has no such call. keys() throws kUnsupported
// unless the store can list its keys. In a forked child every call throws kUnsupported. Throws
// kInvalidArgument if `store` is nullptr.
std::shared_ptr<Store> from_c10d(c10::intrusive_ptr<c10d::Store> store);

}  // namespace convoy
