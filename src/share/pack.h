#pragma once

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

// A message on its way: the bytes, and what must live until they were read.
struct Packed {
  std::string bytes;
  std::vector<Parcel> parcels;
};

// Moves private tensors into shared memory. Throws as Channel::send; tensors that were moved before
// stay so.
Packed pack(const Message& message, Strategy strategy, const NameRegion& name);
// The same as one tensor that any process finds by paths.
Packed pack_self_contained(const at::Tensor& tensor, Strategy strategy);

// The wire form of a block.
WireBlock to_wire(const BlockRef& ref, const NameRegion& name);
BlockRef from_wire(const WireBlock& block, const FindRegion& find);

// Throws kInvalidArgument for bytes that are no message, kPeerLost if memory is gone.
Message unpack(std::string_view bytes, const FindRegion& find);
// Of pack_self_contained.
at::Tensor unpack_self_contained(std::string_view bytes);

}  // namespace convoy::share
