#include "ddp/peer_memory.h"

#include <ATen/Functions.h>

#include <exception>

#include "convoy/error.h"
#include "convoy/group.h"

namespace convoy {

PeerMemory PeerMemory::alone(at::Tensor tensor, int rank, int size) {
  PeerMemory made;
  made.all.resize(static_cast<std::size_t>(size));
  made.data.resize(made.all.size());
  made.data[static_cast<std::size_t>(rank)] = static_cast<std::byte*>(tensor.mutable_data_ptr());
  made.all[static_cast<std::size_t>(rank)] = tensor;
  made.mine = std::move(tensor);
  return made;
}

PeerMemory PeerMemory::share(const ProcessGroup& group, at::Tensor tensor) {
  if (group.size() == 1) return alone(std::move(tensor), 0, 1);
  PeerMemory made;
  made.window = group.window(tensor);
  for (int r = 0; r < group.size(); ++r) {
    made.all.push_back(made.window.at(r));
    made.data.push_back(static_cast<std::byte*>(made.all.back().mutable_data_ptr()));
  }
  made.mine = std::move(tensor);
  return made;
}

PeerMemory PeerMemory::allocate(const ProcessGroup& group, std::size_t bytes, Kind kind) {
  const auto count = static_cast<std::int64_t>(bytes);
  if (kind == Kind::kOwn || group.size() == 1) {
    return alone(at::empty({count}, at::kByte), group.rank(), group.size());
  }
  at::Tensor mine;  // undefined: the window refuses it, everywhere
  std::exception_ptr error;
  try {
    mine = group.allocate({count}, at::kByte);
  } catch (const Error&) {
    error = std::current_exception();
  }
  try {
    return share(group, mine);
  } catch (const Error&) {
    if (error) std::rethrow_exception(error);
    throw;
  }
}

}  // namespace convoy
