#pragma once

#include <cstddef>
#include <span>

namespace convoy::transport::test {

// Bytes of which one page cannot be read: whoever comes there first calls `tripped`, in a signal
// handler, and goes on after lift(). One at a time.
class TripWire {
 public:
  // The page is the one with byte `at`.
  TripWire(std::span<const std::byte> content, std::size_t at, void (*tripped)());
  TripWire(const TripWire&) = delete;
  TripWire& operator=(const TripWire&) = delete;
  ~TripWire();

  std::span<const std::byte> bytes() const { return {data_, bytes_}; }
  void lift();

 private:
  std::byte* data_;
  std::size_t bytes_;
  std::size_t mapped_;
};

}  // namespace convoy::transport::test
