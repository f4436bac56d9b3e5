#pragma once

#include <array>
#include <bit>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "agent/executor.h"

namespace convoy::agent {

// Times by powers of two: bucket b has those of less than 2^b nanoseconds that are in no bucket
// before it.
struct Histogram {
  static constexpr std::size_t kBuckets = 48;

  std::array<std::uint64_t, kBuckets> counts{};

  void add(std::chrono::nanoseconds time) {
    const auto bits =
        std::bit_width(static_cast<std::uint64_t>(time.count() > 0 ? time.count() : 0));
    ++counts[static_cast<std::size_t>(bits) < kBuckets ? static_cast<std::size_t>(bits)
                                                       : kBuckets - 1];
  }
  void add(const Histogram& other) {
    for (std::size_t i = 0; i < kBuckets; ++i) counts[i] += other.counts[i];
  }
  std::uint64_t total() const {
    std::uint64_t sum = 0;
    for (const std::uint64_t count : counts) sum += count;
    return sum;
  }
  // Below which this share (0 to 1) of all times is: an upper bound, a power of two.
  std::chrono::nanoseconds quantile(double share) const;
};

// Calls of one function to one worker, and by it.
struct FunctionStats {
  std::string worker;
  std::string function;
  // Ours to it:
  std::uint64_t calls = 0;  // that have ended
  std::uint64_t errors = 0;
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  Histogram latency;  // from start to end
  // Its to us:
  std::uint64_t served = 0;
  std::uint64_t failed = 0;
  std::uint64_t served_bytes_received = 0;
  std::uint64_t served_bytes_sent = 0;
  Histogram run_time;  // from arrival to answer
};

struct AgentStats {
  std::vector<FunctionStats> functions;
  ExecutorStats executor;
  std::uint64_t inline_runs = 0;  // handlers on the thread that serves
  std::uint64_t takeovers = 0;    // from handlers there that took too long, or waited
  std::uint64_t outstanding = 0;  // our calls
  std::uint64_t requests = 0;     // others' calls that were not answered yet
};

}  // namespace convoy::agent
