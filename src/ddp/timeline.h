#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "convoy/ddp_stats.h"

namespace convoy {

// Times that ranks tell each other: microseconds of the steady clock, which processes of one host
// share. 0: none. They wrap around after an hour; only differences are used.
inline constexpr std::size_t kStampedBuckets = 32;
struct Stamps {
  std::uint32_t computed = 0;
  std::array<std::uint32_t, kStampedBuckets> launched{};
};

// When the parts of rounds happened on one rank. One thread at a time.
class Timeline {
 public:
  using Clock = std::chrono::steady_clock;

  Timeline();

  void forward_begins() { forward_begin_ = now(); }
  void forward_ends() { forward_end_ = now(); }
  void open(Clock::time_point begin);
  void ready(std::size_t bucket) { at(bucket).ready = now(); }
  void launched(std::size_t bucket);
  void done(std::size_t bucket) { at(bucket).done = now(); }
  void set_bytes(std::size_t bucket, std::uint64_t bytes) { at(bucket).bytes = bytes; }
  void set_order(std::vector<std::size_t> order) { round_.order = std::move(order); }
  Stamps stamps(Clock::time_point computed) const;
  // `all` by rank; empty if they do not share a clock.
  void close(std::uint64_t backward, Clock::time_point computed, Clock::time_point end,
             const std::vector<Stamps>& all, int rank);

  void set_sample_rate(std::uint64_t rate) { sampled_.sample_rate = rate; }
  std::uint64_t sample_rate() const { return sampled_.sample_rate; }
  bool is_sampled(std::uint64_t backward) const {
    return backward <= 10 || (backward - 1) % sampled_.sample_rate == 0;
  }
  const RoundTimes& last() const { return last_; }
  const DdpSample& sampled() const { return sampled_; }

 private:
  Clock::time_point now() {
    ++reads_;
    return Clock::now();
  }
  BucketTimes& at(std::size_t bucket);
  void sample();

  RoundTimes round_, last_;
  Clock::time_point forward_begin_, forward_end_, last_end_;
  std::uint64_t reads_ = 0;           // of the clock, in this round
  std::chrono::nanoseconds read_{0};  // what one takes
  DdpSample sampled_;
  std::int64_t samples_ = 0;
};

class ProcessGroup;
// Collective: rank 0 writes one file with what all ranks did in their last round, for
// chrome://tracing and Perfetto. kInvalidArgument on all ranks if it cannot.
void write_trace(const ProcessGroup& group, const RoundTimes& times,
                 const std::vector<std::string>& bucket_names, const std::string& path);

}  // namespace convoy
