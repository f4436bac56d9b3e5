#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "coll/kernels.h"

namespace convoy::coll {

// How an operation's data travels, as far as the choice between stores matters.
enum class Route : std::uint8_t { kDirect, kStaged };
inline constexpr int kRoutes = 2;

// Chooses between stores that stay in the caches and stores that bypass them, by what was faster so
// far. Which one is depends on the size and on how far apart the ranks' cores are, and a virtual
// machine's cores are moved while it runs; so now and then the other one is tried. Used by one rank
// for all. Not thread-safe.
class Tuner {
 public:
  // `guess` comes first for staged data; data that goes straight to its place begins with
  // streaming.
  explicit Tuner(StoreHint guess) : guess_(guess) {}

  StoreHint choose(Route route, std::size_t bytes);
  void record(Route route, std::size_t bytes, StoreHint hint, std::chrono::nanoseconds took);

 private:
  static constexpr int kClasses = 5;
  // Operations between two tries of what was slower.
  static constexpr std::uint32_t kPause = 32;

  struct Class {
    std::array<double, 2> cost{};  // nanoseconds a byte, smoothed; 0: never tried. By StoreHint
    std::uint32_t operations = 0;
  };

  static int class_of(std::size_t bytes);
  Class& find(Route route, std::size_t bytes) {
    return classes_[static_cast<std::size_t>(route)][static_cast<std::size_t>(class_of(bytes))];
  }

  StoreHint guess_;
  std::array<std::array<Class, kClasses>, kRoutes> classes_{};
};

}  // namespace convoy::coll
