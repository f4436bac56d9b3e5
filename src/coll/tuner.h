#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "coll/kernels.h"

namespace convoy::coll {

// Which ways there are for an operation's data, of which one is chosen.
enum class Route : std::uint8_t {
  kDirect,    // everything is within reach: stores that stay in the caches, or that bypass them
  kStaged,    // the same choice for staging buffers
  kMoved,     // that, or reading out of the other process
  kCombined,  // that of kStaged, or only staging bypasses the caches and results stay in them
};
inline constexpr int kRoutes = 4;

enum class Way : std::uint8_t { kCached, kStreaming, kRead, kMixed };
inline constexpr int kWays = 4;
inline StoreHint store_hint(Way way) {
  return way == Way::kStreaming ? StoreHint::kStreaming : StoreHint::kCached;
}

// Chooses a way by what was fastest lately. That depends on the operation, on the size and on how
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
  static constexpr int kKinds = 32;
  static constexpr int kClasses = 5;
  static constexpr std::uint32_t kFirstTries = 3;
  static constexpr std::uint32_t kRecent = 4;
  // After so many operations a way that took twice as long is tried again.
  static constexpr float kPatience = 128;

  // Of one way. Disturbances only make it slower: the best of its recent tries counts.
  struct Notes {
    float cost() const;

    std::array<float, kRecent> recent{};  // nanoseconds a byte
    std::uint32_t tries = 0;
    std::uint32_t last = 0;  // operation of its last try
  };
  struct Class {
    std::array<Notes, kWays> notes{};
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
