#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/unique_fd.h"
#include "os/segment.h"
#include "os/wait.h"

namespace convoy::share {

// Messages in one direction between two processes: a ring of bytes in shared memory, one writer and
// one reader. A message is there as a whole or not at all. Does not wait: see Link.
//
// Each side owns one counter and reads the other's; what the other side's memory says is checked
// before it is used.
class Ring {
 public:
  static constexpr std::size_t kCapacity = std::size_t{1} << 18;
  static constexpr std::size_t kMostBytes = kCapacity / 4;  // of a message

  Ring() = default;
  // The writer makes it, the reader adopts it.
  static Ring create();
  static Ring adopt(UniqueFd fd, std::size_t bytes);

  explicit operator bool() const { return segment_ != nullptr; }
  int fd() const { return segment_->fd(); }
  std::size_t bytes() const { return segment_->size(); }

  // Writer. False: no room now. A message is at most kMostBytes.
  bool try_write(std::span<const std::byte> message);
  bool has_room(std::size_t message_bytes) const;
  // How many messages the reader is done with.
  std::uint64_t done() const;

  // Reader. Throws kPeerLost if the writer's side is not a ring any more.
  bool has_message() const;
  std::vector<std::byte> read();  // has_message() was true
  void finish();                  // is done with the message that it read last

  // Raised by who is about to sleep until the other side has moved.
  SleepFlag& reader_sleeps() const;
  SleepFlag& writer_sleeps() const;

 private:
  struct Head;
  explicit Ring(std::shared_ptr<const Segment> segment) : segment_(std::move(segment)) {}
  Head& head() const { return *reinterpret_cast<Head*>(segment_->data()); }
  std::byte* data() const;
  void copy_in(std::uint64_t at, std::span<const std::byte> bytes) const;
  void copy_out(std::uint64_t at, std::span<std::byte> bytes) const;
  std::uint64_t written_checked() const;

  std::shared_ptr<const Segment> segment_;
  std::uint64_t position_ = 0;  // of this side
  std::uint64_t finished_ = 0;  // messages, of the reader
};

}  // namespace convoy::share
