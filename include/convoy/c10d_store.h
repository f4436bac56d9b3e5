#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>

#include "convoy/store.h"

namespace c10d {
class Store;
}

namespace convoy {

// Our store as torch's, so that foreign backends (and Python) can meet through it. Thread-safe like
// the store itself; clone() shares the connection. Errors arrive as torch's: a deadline as
// c10::DistStoreError, everything else as c10::DistNetworkError.
c10::intrusive_ptr<c10d::Store> to_c10d(std::shared_ptr<Store> store);

// Torch's store (TCPStore, FileStore, HashStore, ...) as ours. An adapter made by to_c10d gives
// back the store it was made from. Torch's exceptions arrive as Error (kTimeout, kPeerLost). What
// torch's stores cannot do is made up for: watch() polls, keys() needs a store that lists its keys
// (kUnsupported otherwise).
std::shared_ptr<Store> from_c10d(c10::intrusive_ptr<c10d::Store> store);

}  // namespace convoy
