#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "os/wait.h"
#include "share/book.h"

namespace convoy::share {

// Versions of some bytes in shared memory, of which one process writes and many read the newest.
//
//   Head        what the memory is, and which version is the newest
//   buffers     for each: which version lies in it, and since when
//   readers     for each reader: its process, and how often it has pinned each buffer
//   layout      bytes that say what the data is, written once
//   data        the buffers themselves
//
// A reader announces the buffer of the newest version in its slot (a pin), and then looks whether
// it still is the newest: if so, whoever wants to write into that buffer later must first have made
// another one the newest, looks at the pins after that, and finds this one. If not, it begins
// again. So nobody waits for anybody: the writer takes a buffer that is not the newest and that
// nobody has pinned, and what is being written is never what a reader can get. Pins of dead
// processes do not count.
//
// One writer: publishing is refused while another process that lives has published before, or
// another thread does.
inline constexpr std::size_t kMostBuffers = 16;
inline constexpr std::size_t kMostReaders = 256;

struct BoardHead {
  static constexpr std::uint64_t kMagic = 0x3244524f42565643;  // "CVVBORD2"

  std::uint64_t magic = 0;  // written last, by who made it, as all up to `domain`
  std::uint32_t buffers = 0;
  std::uint32_t unused = 0;
  std::uint64_t buffer_bytes = 0;
  std::uint64_t layout_bytes = 0;
  std::uint64_t layout_offset = 0;
  std::uint64_t data_offset = 0;
  std::uint64_t domain = 0;  // process_domain() of all users
  // Changed by compare-and-swap by who begins to publish.
  std::atomic<ProcessWord> writer{0};
  // Who is at it right now. By compare-and-swap: 0 or a dead process to the writer; back to 0 by
  // it, in release order.
  std::atomic<ProcessWord> writing{0};
  // version << 8 | buffer. Written by the writer; sequentially consistent, as pins are.
  std::atomic<std::uint64_t> newest{0};
  WaitWord news;  // the low bits of the version, written by the writer after `newest`
};
static_assert(sizeof(BoardHead) <= 128);

struct BoardBuffer {
  // Both written by the writer before the buffer becomes the newest, and read by who has pinned it.
  std::atomic<std::uint64_t> version{0};
  std::atomic<std::int64_t> published_ns{0};  // of the steady clock, which all processes share
};

struct alignas(64) BoardReader {
  // Who has the slot. By compare-and-swap: 0 to a process by itself; from a dead one to 0 or to
  // another by anybody; to 0 by itself. Slots of process 0 have no pins, whatever the words say.
  std::atomic<ProcessWord> process{0};
  // Written by the slot's process, read by the writer; sequentially consistent.
  std::array<std::atomic<std::uint32_t>, kMostBuffers> pins{};
};

// A view of a board in mapped memory. A value; methods may be called from any thread of any process
// except where the writer is named.
class VersionBoard {
 public:
  VersionBoard() = default;
  static std::size_t bytes_for(std::size_t buffers, std::size_t buffer_bytes,
                               std::size_t layout_bytes);
  // Lays out a board without a version in memory of bytes_for(). Clears all of it, so that its
  // pages are there.
  static VersionBoard create(std::span<std::byte> memory, std::size_t buffers,
                             std::size_t buffer_bytes, std::string_view layout);
  // What another process laid out. Throws kInvalidArgument.
  static VersionBoard open(std::span<std::byte> memory);

  std::size_t buffers() const { return buffers_; }
  std::size_t buffer_bytes() const { return buffer_bytes_; }
  std::string_view layout() const { return layout_; }
  std::byte* data(std::size_t buffer) const { return data_ + buffer * stride_; }

  // The newest one, 0 if there is none.
  std::uint64_t version() const;
  ProcessWord writer() const { return head_->writer.load(std::memory_order_acquire); }
  // Waits for one that is newer. False at the deadline, or (looked at now and then) when the writer
  // has ended.
  bool wait_newer(std::uint64_t version, const Deadline& deadline) const;

  // Readers. A slot for this process; kResource when there are none left.
  std::size_t enter() const;
  void leave(std::size_t slot) const noexcept;
  struct Pinned {
    std::size_t buffer = 0;
    std::uint64_t version = 0;
    std::chrono::steady_clock::time_point published;
  };
  // nullopt: there is no version yet.
  std::optional<Pinned> pin(std::size_t slot) const;
  void unpin(std::size_t slot, std::size_t buffer) const noexcept;

  // The writer. Throws kInvalidArgument if there is another. A buffer to write into is returned;
  // then publish() or give_up(), once. kResource if readers hold all of them until the deadline.
  std::size_t begin(const Deadline& deadline) const;
  std::uint64_t publish(std::size_t buffer) const;
  void give_up() const noexcept;

  // Who has pinned something, for messages and tests.
  std::vector<ProcessWord> holders() const;

 private:
  void become_writer() const;
  std::optional<std::size_t> find_free() const;
  bool is_pinned(std::size_t buffer) const;
  void drop_dead() const;
  ProcessWord self() const;

  BoardHead* head_ = nullptr;
  BoardBuffer* states_ = nullptr;
  BoardReader* readers_ = nullptr;
  std::byte* data_ = nullptr;
  // Copies of what the head says: it could be changed by a process that went wrong.
  std::size_t buffers_ = 0;
  std::size_t buffer_bytes_ = 0;
  std::size_t stride_ = 0;
  std::uint64_t domain_ = 0;
  std::string_view layout_;
};

}  // namespace convoy::share
