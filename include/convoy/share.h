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

// Where tensors that are shared from now on are put. What is shared already stays where it is, and
// can be sent whatever the strategy.
enum class Strategy {
  kDescriptor,  // memory without a name, passed as descriptors: nothing to clean up, ever
  kFile,        // a file for each storage, for processes without a socket in common
};
Strategy get_sharing_strategy();
void set_sharing_strategy(Strategy strategy);

// A contiguous CPU tensor in shared memory, not cleared. kResource if memory does not suffice,
// kUnsupported for another device or layout than the CPU's strided.
at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options = {});

// Moves a tensor's storages into shared memory, in place: every view of them follows. A copy, once;
// memory that is shared stays where it is. From then on a storage cannot be resized (torch says
// so). Returns the tensor. kResource; kUnsupported as send().
at::Tensor share_memory_(const at::Tensor& tensor);
// All of its memory is shared memory of this library's: of this module's, or a group's.
bool is_shared(const at::Tensor& tensor);

// Encodes a tensor as bytes, which any process of this user on this host can decode, once. They may
// travel any way. The memory is kept until they are decoded or this process ends: bytes that are
// thrown away keep it. Throws as send().
std::string to_bytes(const at::Tensor& tensor);
// kPeerLost if the memory is gone: its owner has ended, or the bytes were decoded before.
at::Tensor from_bytes(std::string_view bytes);

// Returns unused memory for shared tensors to the system; returns the number of bytes.
std::size_t trim();

struct Usage {
  std::size_t pool_bytes = 0;  // of this process's memory for shared tensors
  std::size_t blocks = 0;      // storages in it, in use by any process
  std::size_t elsewhere = 0;   // of these, in use only by others
  std::size_t foreign = 0;     // storages of other processes, in use here
};
Usage usage();

// --- Messages ---------------------------------------------------------------------------------

using Bytes = std::vector<std::byte>;

// An object of Python, pickled; its tensors are values behind it. Python reads it; C++ may pass it
// on.
struct PythonObject {
  std::string pickle;

  friend bool operator==(const PythonObject&, const PythonObject&) = default;
};

// What processes use together besides memory: a Queue, an Event, a Barrier or a Lock, each of which
// is one (convoy/queue.h). Copies are the same object; it lives as long as any process has it.
class Shared {
 public:
  enum class Kind : std::uint32_t { kQueue = 1, kEvent, kBarrier, kLock };
  struct Impl;

  Shared() = default;  // nothing
  explicit Shared(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  // Takes ownership of descriptors, also when it throws: duplicates of what descriptors() returned
  // in another process, inherited or passed over a socket. kInvalidArgument.
  static Shared adopt(const std::vector<int>& descriptors);
  std::vector<int> descriptors() const;  // they stay this object's

  explicit operator bool() const { return impl_ != nullptr; }
  Kind kind() const;
  friend bool operator==(const Shared&, const Shared&) = default;  // the same object
  Impl& impl() const;                                              // kInvalidArgument: nothing

 private:
  std::shared_ptr<Impl> impl_;
};

// std::monostate: Python's None. A Shared only over a channel.
using Value = std::variant<std::monostate, bool, std::int64_t, double, std::string, Bytes,
                           at::Tensor, PythonObject, Shared>;

// What one send() carries. A value.
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

  // kInvalidArgument if there is no value i, or one of another kind; the text names it.
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
  // Of calls without a deadline.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

// One end of a connection between two processes (or threads), both of which send and receive.
// Messages arrive in order. Copies are the same end; it is closed by close() or with the last copy.
// Thread-safe: threads that send take turns, and so do those that receive.
//
// A sent tensor's memory stays until the other side has received it, even if the sender drops it;
// after that the receiver's tensor keeps it, even if the sender's process ends.
class Channel {
 public:
  Channel() = default;  // no channel
  // Takes over a descriptor that release() gave, usually in another process.
  static Channel adopt(int descriptor, const ChannelOptions& options = {});
  explicit operator bool() const { return impl_ != nullptr; }

  // Blocks only while the channel is full. Private tensors become shared ones. kTimeout: nothing
  // was sent. kPeerLost: the other side is closed or its process has ended. kInvalidArgument: a
  // tensor that is the result of a computation and requires a gradient, or an undefined one.
  // kUnsupported: a tensor of a kind that cannot be shared. kResource.
  void send(const at::Tensor& tensor) const;
  void send(const Message& message) const;
  void send(const Message& message, const Deadline& deadline) const;

  // The next message, which must be one tensor; kInvalidArgument if it is something else (which
  // then is the next for receive_message). kTimeout. kPeerLost once all was received that the other
  // side sent before it was closed or ended.
  at::Tensor receive() const;
  at::Tensor receive(const Deadline& deadline) const;
  Message receive_message() const;
  Message receive_message(const Deadline& deadline) const;
  // nullopt: nothing is there yet.
  std::optional<Message> try_receive() const;

  // Closes the channel; wakes up the peer and the calls that wait here.
  void close() const;
  // Gives away the descriptor of an unused end, to be inherited by or passed to another process.
  // This object is closed then. kInvalidArgument.
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

// Two ends: for threads, or for processes of which one gets an end by release() and adopt().
std::pair<Channel, Channel> channel(const ChannelOptions& options = {});

// Accepts connections from processes of this user. Movable; thread-safe except for moves. The path
// is removed by the destructor.
class ChannelListener {
 public:
  ChannelListener(ChannelListener&&) noexcept;
  ChannelListener& operator=(ChannelListener&&) noexcept;
  ~ChannelListener();

  const std::string& path() const;
  // The next connection; other users are refused, with a warning in the log. kTimeout.
  Channel accept(const Deadline& deadline, const ChannelOptions& options = {}) const;

 private:
  friend ChannelListener listen(const std::string& path);
  struct Impl;
  explicit ChannelListener(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

// A socket of mode 0600 at `path`, in a folder that only this user may enter (0700), which is made
// if it is missing. kInvalidArgument for another folder, a path that is taken or too long.
ChannelListener listen(const std::string& path);
// kPeerLost if nobody listens there; kInvalidArgument if it is another user. Does not wait for the
// listener to accept: messages can be sent before.
Channel connect(const std::string& path, const Deadline& deadline,
                const ChannelOptions& options = {});

}  // namespace convoy::share
