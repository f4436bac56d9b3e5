// ProcessGroup: objects, which are bytes whose number only their owner knows. Lengths go first.
#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "base/error.h"
#include "group/process_group_impl.h"

namespace convoy {
namespace {

using Tensors = std::vector<at::Tensor>;

// The object's own memory, as a tensor.
template <class Bytes>
at::Tensor view_of(Bytes& object) {
  return at::from_blob(const_cast<void*>(static_cast<const void*>(object.data())),
                       {static_cast<std::int64_t>(object.size())}, at::kByte);
}

template <class Bytes>
Bytes make(std::int64_t length) {
  return Bytes(static_cast<std::size_t>(length), typename Bytes::value_type());
}

template <class Bytes>
Bytes copy_of(const at::Tensor& padded, std::int64_t length) {
  auto object = make<Bytes>(length);
  std::copy_n(static_cast<const typename Bytes::value_type*>(padded.const_data_ptr()), length,
              object.begin());
  return object;
}

// Memory that a backend may go on using after an operation has failed, as MPI does: it must belong
// to a tensor.
template <class Bytes>
at::Tensor lasting(const ProcessGroup::Impl& group, const Bytes& object) {
  return group.shares_memory() ? view_of(object) : view_of(object).clone();
}

template <class Bytes>
at::Tensor padded(const Bytes& object, std::int64_t length) {
  auto tensor = at::zeros({length}, at::kByte);
  tensor.slice(0, 0, static_cast<std::int64_t>(object.size())).copy_(view_of(object));
  return tensor;
}

std::vector<std::int64_t> to_vector(const at::Tensor& numbers) {
  const auto* first = numbers.const_data_ptr<std::int64_t>();
  return {first, first + numbers.numel()};
}

std::int64_t longest(const std::vector<std::int64_t>& lengths) {
  return *std::max_element(lengths.begin(), lengths.end());
}

template <class Bytes>
at::Tensor length_of(const Bytes& object) {
  return at::tensor({static_cast<std::int64_t>(object.size())}, at::kLong);
}

}  // namespace

template <ByteString Bytes>
std::vector<Bytes> ProcessGroup::all_gather_object(const Bytes& mine, const CallOptions& options,
                                                   const CallSite& where) const {
  const CallScope scope(where);
  const auto lengths = to_vector(all_gather(length_of(mine), options));
  std::vector<Bytes> objects;
  Tensors tensors;
  if (impl().shares_memory()) {
    for (const auto length : lengths) objects.push_back(make<Bytes>(length));
    for (auto& object : objects) tensors.push_back(view_of(object));
    all_gather(tensors, view_of(mine), options);
    return objects;
  }
  const auto length = longest(lengths);  // others want equal ones
  for (std::size_t r = 0; r < lengths.size(); ++r) {
    tensors.push_back(at::empty({length}, at::kByte));
  }
  all_gather(tensors, padded(mine, length), options);
  for (std::size_t r = 0; r < lengths.size(); ++r) {
    objects.push_back(copy_of<Bytes>(tensors[r], lengths[r]));
  }
  return objects;
}

template <ByteString Bytes>
std::vector<Bytes> ProcessGroup::gather_object(const Bytes& mine, const RootOptions& options,
                                               const CallSite& where) const {
  const CallScope scope(where);
  const auto lengths =
      to_vector(all_gather(length_of(mine), CallOptions{.timeout = options.timeout}));
  const bool is_root = rank() == options.root;
  std::vector<Bytes> objects;
  Tensors tensors;
  if (impl().shares_memory()) {
    if (is_root) {
      for (const auto length : lengths) objects.push_back(make<Bytes>(length));
    }
    for (auto& object : objects) tensors.push_back(view_of(object));
    gather(tensors, view_of(mine), options);
    return objects;
  }
  const auto length = longest(lengths);
  for (std::size_t r = 0; is_root && r < lengths.size(); ++r) {
    tensors.push_back(at::empty({length}, at::kByte));
  }
  gather(tensors, padded(mine, length), options);
  for (std::size_t r = 0; r < tensors.size(); ++r) {
    objects.push_back(copy_of<Bytes>(tensors[r], lengths[r]));
  }
  return objects;
}

template <ByteString Bytes>
Bytes ProcessGroup::broadcast_object(const Bytes& mine, const RootOptions& options,
                                     const CallSite& where) const {
  const CallScope scope(where);
  const at::Tensor length = length_of(mine);
  broadcast(length, options);
  auto object = rank() == options.root ? mine : make<Bytes>(length.item<std::int64_t>());
  const auto memory = lasting(impl(), object);
  broadcast(memory, options);
  return copy_of<Bytes>(memory, memory.numel());
}

template <ByteString Bytes>
Bytes ProcessGroup::scatter_object(const std::vector<Bytes>& all, const RootOptions& options,
                                   const CallSite& where) const {
  const CallScope scope(where);
  const bool is_root = rank() == options.root;
  const auto n = static_cast<std::size_t>(size());
  const auto lengths = at::full({size()}, -1, at::kLong);
  if (is_root && all.size() == n) {
    for (std::size_t r = 0; r < n; ++r) {
      lengths[static_cast<std::int64_t>(r)].fill_(static_cast<std::int64_t>(all[r].size()));
    }
  }
  // A root that cannot go on says so, instead of letting the others wait.
  broadcast(lengths, options);
  const auto known = to_vector(lengths);
  if (known[0] < 0) {
    fail(ErrorKind::kInvalidArgument, impl().head("scatter_object"), "the root, rank ",
         options.root, ", must pass ", n, " objects, one for each rank",
         is_root ? ", got " + std::to_string(all.size()) : "");
  }
  const auto mine = known[static_cast<std::size_t>(rank())];
  Tensors tensors;
  if (impl().shares_memory()) {
    for (std::size_t r = 0; is_root && r < n; ++r) tensors.push_back(view_of(all[r]));
    auto object = make<Bytes>(mine);
    scatter(view_of(object), tensors, options);
    return object;
  }
  const auto length = longest(known);
  for (std::size_t r = 0; is_root && r < n; ++r) tensors.push_back(padded(all[r], length));
  const auto part = at::empty({length}, at::kByte);
  scatter(part, tensors, options);
  return copy_of<Bytes>(part, mine);
}

template <ByteString Bytes>
void ProcessGroup::send_object(const Bytes& object, int target, const MessageOptions& options,
                               const CallSite& where) const {
  const CallScope scope(where);
  send(length_of(object), target, options);
  send(lasting(impl(), object), target, options);
}

template <ByteString Bytes>
Bytes ProcessGroup::recv_object(int source, const MessageOptions& options,
                                const CallSite& where) const {
  const CallScope scope(where);
  const auto length = at::empty({1}, at::kLong);
  const int sender = recv(length, source, options);
  if (length.item<std::int64_t>() < 0) {
    fail(ErrorKind::kInvalidArgument, impl().head("recv_object"), "what rank ", sender,
         " sent is not an object");
  }
  auto object = make<Bytes>(length.item<std::int64_t>());
  const auto memory = lasting(impl(), object);
  recv(memory, sender, options);
  return copy_of<Bytes>(memory, memory.numel());
}

// The types of ByteString.
#define CONVOY_OBJECTS(Bytes)                                                                      \
  template std::vector<Bytes> ProcessGroup::all_gather_object(const Bytes&, const CallOptions&,    \
                                                              const CallSite&) const;              \
  template std::vector<Bytes> ProcessGroup::gather_object(const Bytes&, const RootOptions&,        \
                                                          const CallSite&) const;                  \
  template Bytes ProcessGroup::broadcast_object(const Bytes&, const RootOptions&, const CallSite&) \
      const;                                                                                       \
  template Bytes ProcessGroup::scatter_object(const std::vector<Bytes>&, const RootOptions&,       \
                                              const CallSite&) const;                              \
  template void ProcessGroup::send_object(const Bytes&, int, const MessageOptions&,                \
                                          const CallSite&) const;                                  \
  template Bytes ProcessGroup::recv_object(int, const MessageOptions&, const CallSite&) const;
CONVOY_OBJECTS(std::string)
CONVOY_OBJECTS(std::vector<std::byte>)
CONVOY_OBJECTS(std::vector<std::uint8_t>)
#undef CONVOY_OBJECTS

}  // namespace convoy
