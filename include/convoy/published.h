#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "convoy/deadline.h"
#include "convoy/slots.h"
#include "convoy/values.h"

namespace convoy::share {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

// One complete version of published tensors. A value: copies are the same version. Its tensors are
// the shared memory itself: do not write to them. The memory does not change while this object or
// any of its tensors lives. Drop them when you are done: a version that is held keeps a buffer.
// Methods of an empty one throw kInvalidArgument. In a forked child, taking tensors from a Snapshot
// of the parent throws kUnsupported.
class Snapshot {
 public:
  Snapshot() = default;  // none
  explicit operator bool() const { return pin_ != nullptr; }

  std::uint64_t version() const;         // 1 for the first one
  std::chrono::nanoseconds age() const;  // time since it was published
  std::size_t size() const;              // number of tensors
  const std::string& name(std::size_t i) const;
  at::Tensor operator[](std::size_t i) const;
  at::Tensor operator[](std::string_view name) const;  // throws kInvalidArgument if there is none
  std::vector<at::Tensor> tensors() const;

 private:
  friend class PublishedTensors;
  struct Pin;
  explicit Snapshot(std::shared_ptr<Pin> pin) : pin_(std::move(pin)) {}
  Pin& pin() const;

  std::shared_ptr<Pin> pin_;
};

struct PublishedOptions {
  // How many versions the memory holds, 2 to 16: the newest, the one that is being written, and
  // older ones that readers still hold. If each reader holds one version at a time, two more
  // buffers than readers are enough: then publish() always finds a free buffer.
  std::size_t buffers = 4;
  // How long publish() waits if readers hold all buffers. Otherwise it does not wait.
  std::chrono::milliseconds patience = std::chrono::seconds(1);
};

// The part of Published that does not depend on T.
class PublishedTensors {
 public:
  PublishedTensors() = default;  // none
  // Allocates memory for `buffers` versions and publishes the first one. Throws kResource if memory
  // does not suffice, kInvalidArgument for no tensors or an undefined one, kUnsupported for one
  // that is not strided.
  PublishedTensors(const std::vector<NamedTensor>& tensors, const PublishedOptions& options);
  explicit operator bool() const { return impl_ != nullptr; }

  // Copies the tensors into a free buffer, makes them the newest version and returns its number.
  // Throws kInvalidArgument if the tensors are not those of the constructor, or if another process
  // or thread is the publisher. Throws kResource if readers hold all buffers for `patience`;
  // nothing was published then. If the publishing process has died, the next process that calls
  // publish() takes its place.
  std::uint64_t publish(const std::vector<NamedTensor>& tensors) const;

  // Returns the newest version. Never waits. Throws kResource if 256 processes read already,
  // kPeerLost if the publisher died before its first version was complete.
  Snapshot read() const;
  // Waits for a version newer than this one. Throws kTimeout at the deadline, kPeerLost if the
  // publisher has ended.
  Snapshot read_newer(std::uint64_t version, const Deadline& deadline) const;
  // Copies the newest version into tensors of the same names and shapes. Returns its number. Throws
  // kInvalidArgument if names, shapes or types differ.
  std::uint64_t load_into(const std::vector<NamedTensor>& tensors) const;

  std::uint64_t version() const;  // of the newest
  // How many versions newer than this one there are.
  std::uint64_t behind(const Snapshot& snapshot) const { return version() - snapshot.version(); }

  // In messages this object travels as a tensor. open() makes it from that tensor again, and throws
  // kInvalidArgument for any other tensor.
  at::Tensor handle() const;
  static PublishedTensors open(const at::Tensor& handle);

 private:
  friend class Snapshot;
  struct Impl;
  struct Reader;
  Impl& impl() const;

  std::shared_ptr<Impl> impl_;
};

namespace detail {

template <class T>
void add_named(std::vector<NamedTensor>& to, const T& items) {
  for (const auto& item : items) to.push_back({item.key(), item.value()});
}

// The parameters and buffers of a module or its holder, or the tensors of a list or map.
template <class T>
std::vector<NamedTensor> named_tensors(const T& source) {
  std::vector<NamedTensor> found;
  if constexpr (requires { source->named_parameters(); }) {
    add_named(found, source->named_parameters());
    add_named(found, source->named_buffers());
  } else if constexpr (requires { source.named_parameters(); }) {
    add_named(found, source.named_parameters());
    add_named(found, source.named_buffers());
  } else if constexpr (requires { source.begin()->second; }) {
    for (const auto& [name, tensor] : source) found.push_back({name, tensor});
  } else {
    for (const at::Tensor& tensor : source) found.push_back({std::to_string(found.size()), tensor});
  }
  return found;
}

}  // namespace detail

// Tensors with one publisher and many readers, for example weights from a learner to its actors.
// The publisher makes versions, readers get the newest. T is a module (torch::nn::Linear, a
// std::shared_ptr of one, or the module itself), whose parameters and buffers are published, or a
// vector or map of tensors.
//
//   convoy::share::Published<Net> weights(net);      // the learner
//   weights.publish(net);                            // after each step
//   weights.load_into(net);                          // an actor; or without a copy:
//   const auto now = weights.read();
//   now["fc.weight"], now.version(), weights.behind(now)
//
// A reader always sees one complete version. Readers never block the publisher, even if they die.
// Copies are the same object, also in other processes that it is passed to. Thread-safe, except for
// constructors and assignment.
template <class T>
class Published : public PublishedTensors {
 public:
  Published() = default;
  explicit Published(const T& source, const PublishedOptions& options = {})
      : PublishedTensors(detail::named_tensors(source), options) {}

  std::uint64_t publish(const T& source) const {
    return PublishedTensors::publish(detail::named_tensors(source));
  }
  std::uint64_t load_into(const T& target) const {
    return PublishedTensors::load_into(detail::named_tensors(target));
  }

  static Published open(const at::Tensor& handle) {
    return Published(PublishedTensors::open(handle));
  }
  void put_values(Message& to) const { to.add(handle()); }
  static Published take_values(ValueReader& from) { return open(from.take<at::Tensor>()); }

 private:
  explicit Published(PublishedTensors&& tensors) : PublishedTensors(std::move(tensors)) {}
};

}  // namespace convoy::share
