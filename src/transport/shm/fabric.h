#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "transport/shm/peer.h"

namespace convoy::shm {

class Fabric;

// A block of memory that peers see. Freed by the destructor, or later where a peer may still use it
// (see Fabric::quarantine).
class Block {
 public:
  Block() = default;
  Block(Block&& other) noexcept;
  Block& operator=(Block&& other) noexcept;
  ~Block();

  explicit operator bool() const { return data_ != nullptr; }
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  const Location& location() const { return location_; }

 private:
  friend class Fabric;
  Block(Fabric* owner, std::byte* data, std::size_t size, const Location& location)
      : owner_(owner), data_(data), size_(size), location_(location) {}

  Fabric* owner_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  Location location_;
};

// The process-wide owner of shared memory, of the connections to other processes and of the one
// thread that watches them. Made on first use and never destroyed, so that memory and peers stay
// warm between groups. All methods may be called from any thread.
class Fabric {
 public:
  // Throws kUnsupported in a forked child of a process that used it: threads and connections do not
  // survive a fork.
  static Fabric& instance();
  // nullptr if nobody has used it in this process.
  static Fabric* existing() noexcept;

  const ProcessInfo& self() const { return self_; }

  // The process described by `info`, connected. nullptr: this process itself. Both sides must call
  // it. Throws kUnsupported if it runs on another host, kTimeout, kPeerLost. `check` is called now
  // and then while it waits, and throws to end the wait.
  std::shared_ptr<Peer> connect(
      const ProcessInfo& info, const Deadline& deadline,
      const std::function<void()>& check = [] {});

  // Connections that only one side asks for: a process opens a door, others dial it. They are
  // beside those of connect(): each has a socket of its own, and is sent no memory by itself.
  //
  // Called on the watch thread for whoever dials, with the text that it sent; gives what takes its
  // notes. Must not block; if it throws, the other side is turned away.
  using Dialed =
      std::function<Peer::Notes(const std::shared_ptr<Peer>& peer, const std::string& text)>;
  void open_door(const Id& door, Dialed dialed);
  // No call is running when it returns. Not on the watch thread.
  void close_door(const Id& door);
  // Also of this process. Who dials a door that is not there hears that it is closed, as a loss.
  // Throws as connect().
  std::shared_ptr<Peer> dial(const ProcessInfo& info, const Id& door, const std::string& text,
                             Peer::Notes notes, const Deadline& deadline);
  // Ends dialed connections; the other side hears of it. When it returns no note is being taken.
  // Not on the watch thread.
  void hang_up(const std::vector<std::shared_ptr<Peer>>& peers);
  // The same from any thread, without waiting for it: when a later hang_up() returns, or
  // close_door(), no note of these is taken.
  void forget(std::vector<std::shared_ptr<Peer>> peers);

  // At least one byte; aligned to pages; not cleared. Throws kResource.
  Block allocate(std::size_t bytes);
  // Where [address, address + bytes) lies, if it is memory from allocate().
  Location locate(const void* address, std::size_t bytes);
  // The reverse, for this process's own memory; nullptr if it is not (any more).
  std::byte* resolve(const Location& location, std::size_t bytes);

  // Blocks that overlap the location are not handed out again before `released()` is true, even if
  // they are freed: a peer may still write there. Asked at later allocations; must not block. What
  // it looks at itself, if that is memory from allocate(), is `reads`: that stays until then, too.
  void quarantine(const Location& location, std::function<bool()> released,
                  const Location& reads = {});

  // A segment of this process's, for passing it to a process that is no peer. It stays mapped at
  // `data` while a block of it is in use. Throws kInvalidArgument if there is none of this id.
  struct SharedSegment {
    UniqueFd fd;
    std::byte* data;
    std::size_t bytes;
  };
  SharedSegment share_segment(SegmentId id);

  // When it returns, these processes and what they have forked are unable to write into this
  // process's memory: they are killed. They must hold no rank that goes on. Throws as fence() of
  // fence.h; then the memory is not safe.
  void fence(const std::vector<std::shared_ptr<Peer>>& outsiders, const std::string& why,
             const Deadline& deadline);

  // Gives unused segments back to the system; returns the bytes.
  std::size_t trim();

  struct Stats {
    std::size_t mapped_bytes = 0;
    std::size_t used_bytes = 0;
    std::size_t quarantined_blocks = 0;
    std::size_t peers = 0;
    std::size_t unclaimed = 0;  // connections that nobody has asked for yet
  };
  Stats stats();
  // Every descriptor this object holds: for leak checks.
  std::vector<int> descriptors();

  // Tests: bytes by which shared memory may grow, asked instead of the machine. nullptr: back.
  void set_headroom_for_testing(std::function<std::uint64_t()> headroom);

 private:
  friend class Block;
  struct Impl;

  Fabric();
  void require_reachable(const ProcessInfo& info) const;
  void free(const Location& location) noexcept;

  const unsigned generation_;  // fork_generation() of the process that made it
  ProcessInfo self_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace convoy::shm
