#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace convoy::rpc {

// How long things took, by powers of two: counts[b] are those of less than 2^b nanoseconds that are
// in no count before it.
struct Times {
  std::array<std::uint64_t, 48> counts{};

  // Below which this share (0 to 1) of all is: an upper bound, a power of two.
  std::chrono::nanoseconds quantile(double share) const;
};

// Calls of one function to one worker, and of that worker to here.
struct FunctionStats {
  std::string worker;
  std::string function;
  std::uint64_t calls = 0;  // of ours that have ended, well or not
  std::uint64_t errors = 0;
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  Times latency = {};        // from the call to its end
  std::uint64_t served = 0;  // of theirs that were answered
  std::uint64_t failed = 0;
  std::uint64_t served_bytes_received = 0;
  std::uint64_t served_bytes_sent = 0;
  Times run_time = {};  // from arrival to answer
};

struct Stats {
  std::vector<FunctionStats> functions = {};
  int threads = 0;  // SessionOptions::threads
  int running = 0;  // handlers that do not wait
  int waiting = 0;  // handlers that wait in a call of ours
  std::size_t queued = 0;
  std::uint64_t inline_runs = 0;  // of handlers, on the thread that serves
  std::uint64_t takeovers = 0;    // from handlers there that took longer than was thought
  std::uint64_t outstanding = 0;  // our calls that have not ended
  std::uint64_t requests = 0;     // others' calls that have no answer yet
};

}  // namespace convoy::rpc
