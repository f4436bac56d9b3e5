#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "os/segment.h"

namespace convoy::shm {

// Names a segment of shared memory within the process that made it. Never used twice.
using SegmentId = std::uint64_t;

// A place in a process's shared memory that its peers can find.
struct Location {
  SegmentId segment = 0;  // 0: not in shared memory
  std::uint64_t offset = 0;

  explicit operator bool() const { return segment != 0; }
  friend bool operator==(const Location&, const Location&) = default;
};

// Memory that peers see, handed out in blocks from a few large segments, which stay mapped and warm
// when blocks are freed: first touch costs twenty times a copy. Not thread-safe: its owner locks.
class Arena {
 public:
  struct Hooks {
    std::function<SegmentId()> next_id;
    // A new segment is there, before the first block of it is handed out. May throw: the segment is
    // dropped again.
    std::function<void(SegmentId, const Segment&)> added;
    std::function<void(SegmentId)> removed;
    // Bytes by which the arena may grow now.
    std::function<std::uint64_t()> headroom;
  };

  explicit Arena(Hooks hooks) : hooks_(std::move(hooks)) {}

  struct Piece {
    std::byte* data;
    std::size_t size;  // rounded up to kAlignment
    Location location;
  };

  // Blocks begin at multiples of this: a page, so that no two blocks share one.
  static constexpr std::size_t kAlignment = 4096;
  // Segments are as large as all before them together, within these bounds: the first group starts
  // quickly, and a large job has few segments.
  static constexpr std::size_t kLeastSegment = std::size_t{4} << 20;
  static constexpr std::size_t kMostSegment = std::size_t{64} << 20;

  // Throws kResource where memory does not suffice.
  Piece allocate(std::size_t bytes);
  void free(const Location& location);
  // Gives segments without a block in use back to the system; returns the bytes.
  std::size_t trim();

  std::optional<Location> locate(const std::byte* address, std::size_t bytes) const;
  // nullptr if the range is not within one segment.
  std::byte* resolve(const Location& location, std::size_t bytes) const;

  std::size_t mapped_bytes() const;
  std::size_t used_bytes() const;
  void for_each_segment(const std::function<void(SegmentId, const Segment&)>& visit) const;

 private:
  struct Region {
    Segment segment;
    std::map<std::size_t, std::size_t> free;  // offset -> length, no two adjacent
    std::map<std::size_t, std::size_t> used;  // offset -> length
  };

  Region& grow(std::size_t bytes);

  Hooks hooks_;
  std::map<SegmentId, Region> regions_;
};

}  // namespace convoy::shm
