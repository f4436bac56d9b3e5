#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "convoy/deadline.h"

// Tensors between processes of one host and one user, without copies.
//
//   auto [a, b] = convoy::share::channel();          // or listen(path) and connect(path)
//   a.send(tensor);                                  // its storage becomes shared memory, in place
//   const at::Tensor same = b.receive();             // the same bytes
//
// docs/reference/sharing.md tells how long memory lives.
namespace convoy::share {

// --- Memory -----------------------------------------------------------------------------------

// Where tensors that are shared from now on are put. Tensors that are shared already stay where
// they are, and can be sent under any strategy.
enum class Strategy {
  kDescriptor,  // anonymous memory, passed as descriptors: nothing to clean up
  kFile,        // a file for each storage, for processes in different pid namespaces
};
Strategy get_sharing_strategy();
void set_sharing_strategy(Strategy strategy);

// Makes a contiguous CPU tensor in shared memory, uninitialized. Throws kResource if memory does
// not suffice, kUnsupported unless the device is the CPU and the layout strided, kInvalidArgument
// for bad sizes.
at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options = {});

// Moves the storages of a tensor into shared memory, in place: all views of them follow. Private
// memory is copied once; memory that is shared already stays where it is. Afterwards a storage
// cannot be resized (torch throws). Returns the tensor. Throws kResource, and kUnsupported as
// send() does.
at::Tensor share_memory_(const at::Tensor& tensor);
// True if all memory of the tensor is shared memory of this library: of this module or of a group.
bool is_shared(const at::Tensor& tensor);

// Encodes a tensor as bytes, to be passed in any way. One process of this user on this host can
// decode them, once. The memory is kept until then, or until this process ends; so do not drop the
// bytes. Throws as send().
std::string to_bytes(const at::Tensor& tensor);
// Throws kPeerLost if the memory is gone: its owner has ended, or the bytes were decoded before.
// Throws kInvalidArgument for other bytes.
at::Tensor from_bytes(std::string_view bytes);

// Frees unused memory for shared tensors. Returns how many bytes.
std::size_t trim();

struct Usage {
  std::size_t pool_bytes = 0;  // memory of this process for shared tensors
  std::size_t blocks = 0;      // storages in it that any process uses
  std::size_t elsewhere = 0;   // of these, used only by other processes
  std::size_t foreign = 0;     // storages of other processes, used here
};
Usage usage();

// --- Messages ---------------------------------------------------------------------------------

using Bytes = std::vector<std::byte>;

// A pickled Python object. Its tensors are the values that follow it. Python unpickles it; C++ can
// pass it on.
struct PythonObject {
  std::string pickle;

  friend bool operator==(const PythonObject&, const PythonObject&) = default;
};

// An object that processes share besides memory, the base class of Queue, Event, Barrier and Lock
// (convoy/queue.h). Copies are the same object. It lives as long as any process has it.
// Thread-safe.
class Shared {
 public:
  enum class Kind : std::uint32_t { kQueue = 1, kEvent, kBarrier, kLock };
  struct Impl;

  Shared() = default;  // nothing
  explicit Shared(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  // Takes ownership of descriptors, also if it throws. They are duplicates of what descriptors()
  // returned in another process, inherited or passed over a socket. Throws kInvalidArgument for
  // others.
  static Shared adopt(const std::vector<int>& descriptors);
  std::vector<int> descriptors() const;  // this object still owns them

  explicit operator bool() const { return impl_ != nullptr; }
  Kind kind() const;
  friend bool operator==(const Shared&, const Shared&) = default;  // the same object
  Impl& impl() const;  // throws kInvalidArgument if empty

 private:
  std::shared_ptr<Impl> impl_;
};

// std::monostate is Python's None. A Shared can only go over a channel.
using Value = std::variant<std::monostate, bool, std::int64_t, double, std::string, Bytes,
                           at::Tensor, PythonObject, Shared>;

// The values of one send(). A value type.
class Message {
 public:
  Message() = default;
  Message(std::initializer_list<Value> values);
  explicit Message(std::vector<Value> values);

  std::size_t size() const { return values_.size(); }
  const Value& operator[](std::size_t i) const { return values_.at(i); }
  void add(Value value);
  auto begin() const { return values_.begin(); }
  auto end() const { return values_.end(); }

  // Value i. Throws kInvalidArgument if there is none, or if it has another type, which the text
  // names.
  const at::Tensor& tensor(std::size_t i) const;
  const std::string& text(std::size_t i) const;
  std::int64_t integer(std::size_t i) const;
  double real(std::size_t i) const;
  const Bytes& bytes(std::size_t i) const;
  const Shared& shared(std::size_t i) const;  // Queue(message.shared(0))

 private:
  std::vector<Value> values_;
};

// --- Channels ---------------------------------------------------------------------------------

struct ChannelOptions {
  // Timeout of calls without a deadline.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

// One end of a two-way connection between two processes or threads. Messages arrive in order.
// Copies are the same end. It is closed by close() or when the last copy is destroyed. Thread-safe:
// concurrent senders take turns, and so do receivers. In a forked child all calls except close()
// throw kUnsupported.
//
// The memory of a sent tensor is kept until the peer has received it, even if the sender drops it.
// From then on the receiver's tensor keeps it, even if the sender's process ends.
class Channel {
 public:
  Channel() = default;  // no channel
  // Takes ownership of a descriptor from release(), usually of another process. Throws
  // kInvalidArgument if it is not a Unix stream socket.
  static Channel adopt(int descriptor, const ChannelOptions& options = {});
  explicit operator bool() const { return impl_ != nullptr; }

  // Blocks only while the channel is full. Private tensors become shared ones. Throws:
  //   kTimeout          at the deadline; nothing was sent
  //   kPeerLost         if the peer has closed the channel or its process has ended
  //   kInvalidArgument  for an undefined tensor, or a non-leaf that requires a gradient
  //   kUnsupported      for a kind of tensor that cannot be shared
  //   kResource         if memory or descriptors do not suffice
  void send(const at::Tensor& tensor) const;
  void send(const Message& message) const;
  void send(const Message& message, const Deadline& deadline) const;

  // Blocks until there is a message. receive() wants exactly one tensor: for any other message it
  // throws kInvalidArgument, and receive_message() gets that message next. Both throw kTimeout at
  // the deadline, and kPeerLost once all messages of a closed or ended peer were received.
  at::Tensor receive() const;
  at::Tensor receive(const Deadline& deadline) const;
  Message receive_message() const;
  Message receive_message(const Deadline& deadline) const;
  // Does not wait for a message: returns nullopt if there is none.
  std::optional<Message> try_receive() const;

  // Closes the channel. Wakes the peer and all waiters here.
  void close() const;
  // Gives up the descriptor of an unused end, so that another process can inherit it or get it.
  // This object is closed then. Throws kInvalidArgument if the end was used.
  int release() const;

 private:
  friend std::pair<Channel, Channel> channel(const ChannelOptions& options);
  friend class ChannelListener;
  friend Channel connect(const std::string& path, const Deadline& deadline,
                         const ChannelOptions& options);
  struct Impl;
  explicit Channel(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  Impl& impl() const;

  std::shared_ptr<Impl> impl_;
};

// Makes the two ends of a channel: for two threads, or for two processes (release(), adopt()).
std::pair<Channel, Channel> channel(const ChannelOptions& options = {});

// Accepts connections from processes of this user. Movable. Thread-safe, except for moves. The
// destructor removes the path.
class ChannelListener {
 public:
  ChannelListener(ChannelListener&&) noexcept;
  ChannelListener& operator=(ChannelListener&&) noexcept;
  ~ChannelListener();

  const std::string& path() const;
  // Blocks until there is a connection. Throws kTimeout at the deadline. Connections of other users
  // are refused, with a warning in the log.
  Channel accept(const Deadline& deadline, const ChannelOptions& options = {}) const;

 private:
  friend ChannelListener listen(const std::string& path);
  struct Impl;
  explicit ChannelListener(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

// Listens on a socket of mode 0600 at `path`. Its folder may be entered by this user only (0700),
// and is made if it is missing. Throws kInvalidArgument for a folder with other permissions, and
// for a path that is taken or too long.
ChannelListener listen(const std::string& path);
// Does not wait for the listener to accept: messages can be sent before. Throws kPeerLost if no
// process listens there, kTimeout at the deadline, kInvalidArgument if the listener is another
// user.
Channel connect(const std::string& path, const Deadline& deadline,
                const ChannelOptions& options = {});

}  // namespace convoy::share
