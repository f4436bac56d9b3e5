#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "convoy/ddp_stats.h"
#include "convoy/reducer.h"
#include "ddp/bucket.h"
#include "ddp/checks.h"
#include "ddp/parameter_state.h"
#include "ddp/timeline.h"

namespace convoy {

// What is told of rounds: numbers, times, the last error. It changes nothing in them. Invariant:
// stats().backwards counts rounds that have ended, however they did.
class RoundObserver {
 public:
  using Clock = Timeline::Clock;

  Timeline& timeline() { return timeline_; }
  const Timeline& timeline() const { return timeline_; }
  ReducerStats& stats() { return stats_; }
  const ReducerStats& stats() const { return stats_; }
  std::uint64_t number() const { return stats_.backwards + 1; }  // of the round that comes, or is
  DebugLevel debug() const { return debug_; }
  void set_debug(DebugLevel level) { debug_ = level; }
  bool skipped() const { return skipped_; }
  const std::string& error() const { return error_; }

  void open(Clock::time_point entered) {
    stats_.copy_time = stats_.search_time = {};
    timeline_.open(entered);
  }
  struct Closed {
    bool good = false;
    bool shadowed = false;  // this rank had no inputs
    Clock::time_point entered, last_gradient, now;
    std::vector<Stamps> stamps;  // of all ranks; empty if they do not share a clock
    int rank = 0;
  };
  // The round is over; parameters are as it left them.
  void close(const Closed& closed, const std::vector<ParameterState>& parameters,
             const std::vector<at::Tensor>& tensors, const std::vector<Bucket>& buckets);
  // It was none: others do not count it.
  void uncount() { --stats_.backwards; }
  void set_backwards(std::uint64_t backwards) { stats_.backwards = backwards; }
  void failed(std::string error) { error_ = std::move(error); }
  void skip() {
    skipped_ = true;
    ++stats_.skipped;
    error_.clear();
  }
  void fill(DdpStats& data) const;

 private:
  Timeline timeline_;
  ReducerStats stats_;
  DebugLevel debug_ = DebugLevel::kOff;
  bool skipped_ = false;  // the last round
  bool can_be_static_ = true;
  std::vector<bool> last_used_;
  std::int64_t unused_bytes_ = 0;  // of the last round
  std::string error_;              // of the last round
};

}  // namespace convoy
