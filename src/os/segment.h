#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "base/unique_fd.h"

namespace convoy {

// A piece of memory without a name that processes share: a memfd whose pages are allocated up front
// (a full machine gives an error here, never a SIGBUS later) and whose size is sealed (a peer
// cannot shrink it under us). Mapped read-write for the life of the object. Movable; the bytes may
// be used by any thread under the protocol of whoever lays them out.
class Segment {
 public:
  enum class Warm {
    kNo,   // pages are allocated, page tables are filled on first touch
    kYes,  // page tables are filled now, with huge pages where the kernel gives them: the first
           // copy runs at full speed
  };

  Segment() = default;
  // `size` is rounded up to whole pages. Throws kResource if memory or the limit on it does not
  // suffice, kInvalidArgument for size 0.
  // `label` (its first 200 bytes) is what /proc/<pid>/maps shows.
  static Segment create(std::size_t size, const std::string& label, Warm warm = Warm::kNo);
  // Maps a peer's segment after checking that it is a memfd of exactly `size` bytes (what size()
  // says on the side that made it) whose seals forbid shrinking and growing. Throws
  // kInvalidArgument.
  static Segment adopt(UniqueFd fd, std::size_t size, Warm warm = Warm::kNo);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  explicit operator bool() const { return data_ != nullptr; }
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  std::span<std::byte> bytes() const { return {data_, size_}; }
  int fd() const { return fd_.get(); }
  // The mapping stays; the segment cannot be passed on any more.
  void close_descriptor() { fd_.reset(); }

  // Names the memory: two descriptors of one segment have equal keys.
  struct Key {
    std::uint64_t device;
    std::uint64_t inode;
    friend bool operator==(const Key&, const Key&) = default;
    friend auto operator<=>(const Key&, const Key&) = default;
  };
  Key key() const;
  static Key key_of(int fd);

 private:
  Segment(UniqueFd fd, std::byte* data, std::size_t size)
      : fd_(std::move(fd)), data_(data), size_(size) {}

  UniqueFd fd_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

std::size_t page_size();

}  // namespace convoy
