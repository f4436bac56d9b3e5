#pragma once

#include <cstdint>

namespace convoy {

// Numbers that follow from a seed, the same on every machine (splitmix64): for simulations, faults
// and tests. Not for secrets, and not thread-safe.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    state_ += 0x9e3779b97f4a7c15;
    std::uint64_t mixed = state_;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111eb;
    return mixed ^ mixed >> 31;
  }
  // Less than `bound`, which is not 0. Near enough to uniform.
  std::uint64_t below(std::uint64_t bound) { return next() % bound; }
  // True in so many of a million cases.
  bool chance(std::uint32_t per_million) { return below(1'000'000) < per_million; }

 private:
  std::uint64_t state_;
};

}  // namespace convoy
