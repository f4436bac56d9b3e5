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

// One whole version of published tensors. A value; copies are the same version. Its tensors are the
// shared memory itself, which stays as it is as long as this object or any of them lives: do not
// write to them. Drop them when you are done: a version that is held keeps a buffer.
class Snapshot {
 public:
  Snapshot() = default;  // none
  explicit operator bool() const { return pin_ != nullptr; }

  std::uint64_t version() const;         // 1 is the first
  std::chrono::nanoseconds age() const;  // since it was published
  std::size_t size() const;              // tensors
  const std::string& name(std::size_t i) const;
  at::Tensor operator[](std::size_t i) const;
  at::Tensor operator[](std::string_view name) const;  // kInvalidArgument
  std::vector<at::Tensor> tensors() const;

 private:
  friend class PublishedTensors;
  struct Pin;
  explicit Snapshot(std::shared_ptr<Pin> pin) : pin_(std::move(pin)) {}
  Pin& pin() const;

  std::shared_ptr<Pin> pin_;
};

struct PublishedOptions {
  // Versions that fit the memory: the newest, the one that is being written, and the others for
  // readers that hold older ones. With two more than there are readers, each of which holds one
  // version at a time, there always is a buffer to write to (two at least, 16 at most).
  std::size_t buffers = 4;
  // How long publish() waits when readers hold all of them; it never does otherwise.
  std::chrono::milliseconds patience = std::chrono::seconds(1);
};

// What Published is, without knowing what the tensors belong to.
class PublishedTensors {
 public:
  PublishedTensors() = default;  // none
  // Takes memory for `buffers` versions, and publishes the first. kResource.
  PublishedTensors(const std::vector<NamedTensor>& tensors, const PublishedOptions& options);
  explicit operator bool() const { return impl_ != nullptr; }

  // Copies the tensors into a buffer that nobody reads, and makes them the newest version, whose
  // number is returned. kInvalidArgument: other tensors than those of the constructor, or another
  // process publishes. kResource: readers hold all buffers, and did for `patience`; nothing was
  // published. If the process that published has died, the next one that does takes its place.
  std::uint64_t publish(const std::vector<NamedTensor>& tensors) const;

  // The newest version. Never waits.
  Snapshot read() const;
  // Waits for one newer than this. kTimeout; kPeerLost if the process that publishes has ended.
  Snapshot read_newer(std::uint64_t version, const Deadline& deadline) const;
  // Copies the newest version into tensors of the same names and shapes; its number.
  std::uint64_t load_into(const std::vector<NamedTensor>& tensors) const;

  std::uint64_t version() const;  // of the newest
  // How many versions newer than this one there are.
  std::uint64_t behind(const Snapshot& snapshot) const { return version() - snapshot.version(); }

  // How they travel: a tensor stands for them in a message.
  at::Tensor handle() const;
  static PublishedTensors open(const at::Tensor& handle);  // kInvalidArgument

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

// Parameters and buffers of a module, of a holder of one, or a list of tensors.
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

// Tensors of which one process publishes versions and others read the newest: weights, from a
// learner to its actors. T is a module (torch::nn::Linear, a std::shared_ptr of one, or the module
// itself; its parameters and buffers are published), or a vector or map of tensors.
//
//   convoy::share::Published<Net> weights(net);             // the learner
//   weights.publish(net);                            // after each step
//   weights.load_into(net);                          // an actor; or without a copy:
//   const auto now = weights.read();
//   now["fc.weight"], now.version(), weights.behind(now)
//
// A reader always sees one complete version. Readers never block the writer, even if they die.
// Copies, and objects passed to other processes, are the same. All methods but the constructor and
// assignment may be called from any thread.
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
