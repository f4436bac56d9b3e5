#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "convoy/share.h"
#include "share/cache.h"
#include "share/message.h"
#include "tensor/handle.h"

namespace convoy::share {

// The number by which the receiver knows a region. Files are named in the message itself.
using NameRegion = std::function<std::uint32_t(const std::shared_ptr<Region>&)>;
using FindRegion = std::function<std::shared_ptr<Region>(std::uint32_t number)>;

// A region that a message names itself.
using FindNamed = std::function<std::shared_ptr<Region>(const WireRegion& region)>;
// Passes the descriptors of an object; the number of the first. Takes so many from that number on.
using PassShared = std::function<std::uint32_t(const Shared& object)>;
using TakeShared = std::function<Shared(std::uint32_t first, std::uint32_t count)>;

// A message on its way: the bytes, and what must live until they were read.
struct Packed {
  std::string bytes;
  std::vector<Parcel> parcels;
  std::vector<BlockRef> blocks;  // of pack_for_queue: those that the bytes name, in their order
  Lease body;                    // of pack_for_queue: the block that the bytes are in, if any
};

// Moves private tensors into shared memory. Throws as Channel::send; tensors that were moved before
// stay so.
Packed pack(const Message& message, Strategy strategy, const NameRegion& name,
            const PassShared& pass);
// The same as one tensor that any process finds by paths.
Packed pack_self_contained(const at::Tensor& tensor, Strategy strategy);

// The wire form of a block.
WireBlock to_wire(const BlockRef& ref, const NameRegion& name);
BlockRef from_wire(const WireBlock& block, const FindRegion& find);

struct QueuePacking {
  std::size_t most_bytes = 0;  // a larger message is put into a block, and the bytes name that
  std::size_t copy_below = 0;  // private storages up to so many bytes are copied into the message
  Strategy strategy = Strategy::kDescriptor;
  // Sees to it that receivers can find the region by its key.
  std::function<void(const std::shared_ptr<Region>&)> deposit;
};
// A message that any process may read, which finds the memory by its key. The blocks count as under
// way (Book::enter_transit) from when the caller says so, and until unpack_from_queue.
Packed pack_for_queue(const Message& message, const QueuePacking& packing);
// Ends the transit of each block as soon as this process holds all of them, and counts that in
// `progress` (before each: who ends in between leaves a block that is never free, rather than one
// that is free too early). Throws as unpack(); then nothing has changed.
Message unpack_from_queue(std::string_view bytes, const FindNamed& find,
                          std::atomic<std::uint32_t>& progress);

// Throws kInvalidArgument for bytes that are no message, kPeerLost if memory is gone.
Message unpack(std::string_view bytes, const FindRegion& find, const TakeShared& take);
// Of pack_self_contained.
at::Tensor unpack_self_contained(std::string_view bytes);

}  // namespace convoy::share
