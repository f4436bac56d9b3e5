#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace convoy::rpc {

// A histogram of durations by powers of two: counts[b] counts those below 2^b nanoseconds that are
// in no smaller bucket.
struct Times {
  std::array<std::uint64_t, 48> counts{};

  // An upper bound (a power of two) of the quantile; `share` is from 0 to 1.
  std::chrono::nanoseconds quantile(double share) const;
};

// Calls of one function: from this worker to `worker`, and from `worker` to this one.
struct FunctionStats {
  std::string worker;
  std::string function;
  std::uint64_t calls = 0;  // our calls that have ended, with or without an error
  std::uint64_t errors = 0;
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  Times latency = {};        // from the call to its end
  std::uint64_t served = 0;  // their calls that were answered
  std::uint64_t failed = 0;
  std::uint64_t served_bytes_received = 0;
  std::uint64_t served_bytes_sent = 0;
  Times run_time = {};  // from arrival to answer
};

struct Stats {
  std::vector<FunctionStats> functions = {};
  int threads = 0;  // SessionOptions::threads
  int running = 0;  // handlers that run
  int waiting = 0;  // handlers that wait in a call of this library
  std::size_t queued = 0;
  std::uint64_t inline_runs = 0;  // handlers that ran on the serving thread
  std::uint64_t takeovers = 0;    // handlers there that were slow: another thread took over
  std::uint64_t outstanding = 0;  // our calls that have not ended
  std::uint64_t requests = 0;     // calls of others that are not answered yet
};

}  // namespace convoy::rpc
