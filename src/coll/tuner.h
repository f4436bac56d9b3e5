#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "coll/kernels.h"

namespace convoy::coll {

// Which ways there are for an operation's data, of which one is chosen.
enum class Route : std::uint8_t {
  kDirect,  // everything is within reach: stores that stay in the caches, or that bypass them
  kStaged,  // the same choice for staging buffers
  kMoved,   // that, or reading out of the other process
};
inline constexpr int kRoutes = 3;

enum class Way : std::uint8_t { kCached, kStreaming, kRead };
inline constexpr int kWays = 3;
inline StoreHint store_hint(Way way) {
  return way == Way::kStreaming ? StoreHint::kStreaming : StoreHint::kCached;
}

// Chooses a way by what was faster so far. That depends on the operation, on the size and on how
// far apart the ranks' cores are, and a virtual machine's cores are moved while it runs; so now and
// then another one is tried. Used by one rank for all. Not thread-safe.
class Tuner {
 public:
  // `guess` comes first for staged data; data that goes straight to its place begins with
  // streaming.
  explicit Tuner(Way guess) : guess_(guess) {}

  // `kind` tells operations apart.
  Way choose(int kind, Route route, std::size_t bytes);
  void record(int kind, Route route, std::size_t bytes, Way way, std::chrono::nanoseconds took);

 private:
  static constexpr int kKinds = 16;
  static constexpr int kClasses = 5;
  // Operations between two tries of something else.
  static constexpr std::uint32_t kPause = 32;

  struct Class {
    std::array<float, kWays> cost{};  // nanoseconds a byte, smoothed; 0: never tried
    std::uint32_t operations = 0;
  };

  static std::size_t class_of(std::size_t bytes);
  Class& find(int kind, Route route, std::size_t bytes) {
    return classes_[static_cast<std::size_t>(kind % kKinds)][static_cast<std::size_t>(route)]
                   [class_of(bytes)];
  }

  Way guess_;
  std::array<std::array<std::array<Class, kClasses>, kRoutes>, kKinds> classes_{};
};

}  // namespace convoy::coll
