#include "ddp/timeline.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <iomanip>
#include <sstream>
#include <utility>

#include "base/chrome_trace.h"
#include "base/error.h"
#include "convoy/group.h"

namespace convoy {
namespace {

using Time = std::chrono::steady_clock::time_point;
using Nanoseconds = std::chrono::nanoseconds;

std::uint32_t stamp_of(Time time) {
  if (time == Time{}) return 0;
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(time.time_since_epoch());
  const auto low = static_cast<std::uint32_t>(us.count());
  return low == 0 ? 1 : low;
}

// Who is behind `mine` the most, and how much.
template <class StampOf>
void find_last(const std::vector<Stamps>& all, int rank, StampOf stamp, int& who,
               Nanoseconds& later) {
  who = -1;
  later = {};
  if (all.empty()) return;
  const std::uint32_t mine = stamp(all[static_cast<std::size_t>(rank)]);
  if (mine == 0) return;
  for (std::size_t r = 0; r < all.size(); ++r) {
    const std::uint32_t other = stamp(all[r]);
    if (other == 0) continue;
    const Nanoseconds behind = std::chrono::microseconds(static_cast<std::int32_t>(other - mine));
    if (behind > later) {
      later = behind;
      who = static_cast<int>(r);
    }
  }
}

Nanoseconds between(Time from, Time to) {
  return from == Time{} || to == Time{} ? Nanoseconds{0} : Nanoseconds(to - from);
}

double milliseconds(Nanoseconds time) { return static_cast<double>(time.count()) * 1e-6; }

template <class List>
std::string words(const List& list, const char* separator) {
  std::string text;
  for (const auto& item : list) text += concat(text.empty() ? "" : separator, item);
  return text;
}

}  // namespace

Timeline::Timeline() {
  constexpr int kReads = 64;
  const auto start = Clock::now();
  for (int i = 1; i < kReads; ++i) (void)Clock::now();
  read_ = (Clock::now() - start) / kReads;
}

BucketTimes& Timeline::at(std::size_t bucket) {
  if (bucket >= round_.buckets.size()) round_.buckets.resize(bucket + 1);
  return round_.buckets[bucket];
}

void Timeline::open(Clock::time_point begin) {
  round_.buckets.clear();
  round_.begin = begin;
}

void Timeline::launched(std::size_t bucket) {
  BucketTimes& times = at(bucket);
  times.launched = now();
  if (times.ready == Time{}) times.ready = times.launched;
}

Stamps Timeline::stamps(Clock::time_point computed) const {
  Stamps stamps;
  stamps.computed = stamp_of(computed);
  for (std::size_t b = 0; b < std::min(kStampedBuckets, round_.buckets.size()); ++b) {
    stamps.launched[b] = stamp_of(round_.buckets[b].launched);
  }
  return stamps;
}

void Timeline::close(std::uint64_t backward, Clock::time_point computed, Clock::time_point end,
                     const std::vector<Stamps>& all, int rank) {
  round_.backward = backward;
  round_.last_end = std::exchange(last_end_, end);
  round_.forward_begin = std::exchange(forward_begin_, {});
  round_.forward_end = std::exchange(forward_end_, {});
  round_.computed = computed;
  round_.end = end;
  find_last(
      all, rank, [](const Stamps& s) { return s.computed; }, round_.waited_for, round_.waited);
  round_.waited = std::min(round_.waited, Nanoseconds(end - computed));
  for (std::size_t b = 0; b < round_.buckets.size(); ++b) {
    BucketTimes& bucket = round_.buckets[b];
    if (b >= kStampedBuckets) break;
    find_last(
        all, rank, [b](const Stamps& s) { return s.launched[b]; }, bucket.waited_for,
        bucket.waited);
  }
  last_ = round_;
  if (is_sampled(backward)) sample();
  sampled_.observing_time = (now() - end) + static_cast<std::int64_t>(reads_) * read_;
  reads_ = 0;
}

void Timeline::sample() {
  DdpSample& to = sampled_;
  to.iteration = static_cast<std::int64_t>(last_.backward) - 1;
  to.times = last_;
  to.prev_iteration_grad_ready_order_indices = last_.order;
  Time first, last;
  to.num_buckets_reduced = 0;
  for (const BucketTimes& bucket : last_.buckets) {
    if (bucket.launched == Time{}) continue;
    ++to.num_buckets_reduced;
    if (first == Time{} || bucket.launched < first) first = bucket.launched;
    last = std::max(last, bucket.done);
  }
  to.forward_compute_time = between(last_.forward_begin, last_.forward_end);
  to.backward_compute_time = between(last_.begin, last_.computed);
  to.backward_comm_time = std::max(Nanoseconds{0}, between(first, last));
  to.backward_compute_comm_overlap_time =
      std::clamp(between(first, last_.computed), Nanoseconds{0},
                 std::min(to.backward_comm_time, to.backward_compute_time));
  ++samples_;
  const auto average = [this](Nanoseconds& mean, Nanoseconds value) {
    mean += (value - mean) / samples_;
  };
  average(to.avg_forward_compute_time, to.forward_compute_time);
  average(to.avg_backward_compute_time, to.backward_compute_time);
  average(to.avg_backward_comm_time, to.backward_comm_time);
  average(to.avg_backward_compute_comm_overlap_time, to.backward_compute_comm_overlap_time);
}

std::string RoundTimes::report() const {
  if (backward == 0) return "no step yet";
  Time start = last_end;
  if (start == Time{}) start = forward_begin == Time{} ? begin : forward_begin;
  const Nanoseconds all = std::max(Nanoseconds(1), Nanoseconds(end - start));
  const Nanoseconds exposed = std::max(Nanoseconds(0), Nanoseconds(end - computed));
  const Nanoseconds reduce = exposed - waited;
  const auto percent = [&](Nanoseconds part) {
    return static_cast<int>(
        std::lround(100.0 * static_cast<double>(part.count()) / static_cast<double>(all.count())));
  };
  const int waiting = percent(waited), reducing = percent(reduce);
  std::ostringstream text;
  text << "step " << backward << ", " << std::fixed << std::setprecision(1) << milliseconds(all)
       << " ms: compute " << 100 - waiting - reducing << " %";
  if (waited_for >= 0) text << ", waited for rank " << waited_for << " " << waiting << " %";
  text << ", reduce " << reducing << " %";
  return text.str();
}

std::map<std::string, std::string> DdpStats::to_map() const {
  std::vector<std::string> layouts;
  for (const auto& bucket : rebuilt_per_bucket_param_indices) layouts.push_back(words(bucket, " "));
  const auto ns = [](Nanoseconds time) { return std::to_string(time.count()); };
  const auto at = [](Time time) { return std::to_string(time.time_since_epoch().count()); };
  Time first, last;
  for (const BucketTimes& bucket : times.buckets) {
    if (bucket.launched != Time{} && (first == Time{} || bucket.launched < first)) {
      first = bucket.launched;
    }
    last = std::max(last, bucket.done);
  }
  return {
      {"world_size", std::to_string(world_size)},
      {"rank", std::to_string(rank)},
      {"module_name", module_name},
      {"backend_name", backend_name},
      {"device_ids", ""},
      {"output_device", "-1"},
      {"is_multi_device_module", "0"},
      {"dtypes", dtypes},
      {"comm_hook", comm_hook},
      {"broadcast_buffers", std::to_string(broadcast_buffers)},
      {"has_sync_bn", std::to_string(has_sync_bn)},
      {"find_unused_parameters", std::to_string(find_unused_parameters)},
      {"gradient_as_bucket_view", std::to_string(gradient_as_bucket_view)},
      {"static_graph", std::to_string(static_graph)},
      {"can_set_static_graph", std::to_string(can_set_static_graph)},
      {"join_uneven_inputs", std::to_string(join_uneven_inputs)},
      {"bucket_cap_bytes", std::to_string(bucket_cap_bytes)},
      {"num_parameter_tensors", std::to_string(num_parameter_tensors)},
      {"total_parameter_size_bytes", std::to_string(total_parameter_size_bytes)},
      {"bucket_sizes", words(rebuilt_bucket_sizes, ", ")},
      {"has_rebuilt_buckets", std::to_string(has_rebuilt_buckets)},
      {"rebuilt_bucket_sizes", words(rebuilt_bucket_sizes, ", ")},
      {"rebuilt_per_bucket_param_indices", words(layouts, ", ")},
      {"iteration", std::to_string(iteration)},
      {"num_buckets_reduced", std::to_string(num_buckets_reduced)},
      {"unused_parameter_size", std::to_string(unused_parameter_size)},
      {"prev_iteration_grad_ready_order_indices",
       words(prev_iteration_grad_ready_order_indices, ", ")},
      {"forward_compute_time", ns(forward_compute_time)},
      {"backward_compute_time", ns(backward_compute_time)},
      {"backward_comm_time", ns(backward_comm_time)},
      {"backward_compute_comm_overlap_time", ns(backward_compute_comm_overlap_time)},
      {"avg_forward_compute_time", ns(avg_forward_compute_time)},
      {"avg_backward_compute_time", ns(avg_backward_compute_time)},
      {"avg_backward_comm_time", ns(avg_backward_comm_time)},
      {"avg_backward_compute_comm_overlap_time", ns(avg_backward_compute_comm_overlap_time)},
      {"forward_compute_time_start", at(times.forward_begin)},
      {"backward_compute_time_start", at(times.begin)},
      {"backward_compute_time_end", at(times.computed)},
      {"backward_comm_time_start", at(first)},
      {"backward_comm_time_end", at(last)},
      {"has_error", std::to_string(has_error)},
      {"error", error},
  };
}

// --- the trace ---

namespace {

std::string events_of(const RoundTimes& times, const std::vector<std::string>& names, int rank) {
  ChromeTrace trace(rank, concat("rank ", rank));
  trace.span("compute", concat("step ", times.backward), times.last_end, times.end);
  trace.span("compute", "forward", times.forward_begin, times.forward_end);
  trace.span("compute", "backward", times.begin, times.computed);
  if (times.waited_for >= 0) {
    trace.span("compute", concat("waits for rank ", times.waited_for), times.computed,
               times.computed + std::chrono::duration_cast<Time::duration>(times.waited));
  }
  trace.span("compute", "reduce", times.computed + times.waited, times.end);
  for (std::size_t b = 0; b < times.buckets.size(); ++b) {
    const BucketTimes& bucket = times.buckets[b];
    const std::string name = b < names.size() ? names[b] : concat("bucket ", b);
    const std::string lane = concat("bucket ", b);
    trace.span(lane, "ready", bucket.ready, bucket.launched);
    trace.span(lane, name, bucket.launched, bucket.done,
               concat("\"bytes\":", bucket.bytes, ",\"waited_for\":", bucket.waited_for,
                      ",\"waited_us\":", bucket.waited.count() / 1000));
  }
  return trace.text();
}

}  // namespace

void write_trace(const ProcessGroup& group, const RoundTimes& times,
                 const std::vector<std::string>& bucket_names, const std::string& path) {
  const auto all = group.gather_object(events_of(times, bucket_names, group.rank()));
  std::string error;
  if (group.rank() == 0) {
    errno = 0;
    std::ofstream file(path);
    file << chrome_trace(all);
    file.close();
    if (!file)
      error = concat("write_trace: cannot write ", in_quotes(path), ": ", errno_text(errno));
  }
  error = group.broadcast_object(error);
  if (!error.empty()) fail(ErrorKind::kInvalidArgument, error);
}

}  // namespace convoy
