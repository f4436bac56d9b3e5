#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace convoy {

// Times of one bucket in one round. A time is zero if the event did not happen.
struct BucketTimes {
  using Time = std::chrono::steady_clock::time_point;

  std::uint64_t bytes = 0;
  Time ready;     // its last gradient was available
  Time launched;  // this rank started its reduction
  Time done;      // this rank had the result, or checked for it and found it
  // The rank that launched it last, and how much later than this rank. -1: this rank was last, or
  // it is not known: only ranks of backend "convoy" share a clock.
  int waited_for = -1;
  std::chrono::nanoseconds waited{0};
};

// Times of one round on this rank: from the forward to the reduced gradients.
struct RoundTimes {
  using Time = std::chrono::steady_clock::time_point;

  std::uint64_t backward = 0;  // number of the backward, from 1; 0: no round yet
  Time last_end;               // end of the round before, where this step begins; zero in the first
  Time forward_begin, forward_end;
  Time begin;     // of backward
  Time computed;  // the last gradient was available
  Time end;
  int waited_for = -1;  // the rank that computed longest, if not this one; as in BucketTimes
  std::chrono::nanoseconds waited{0};
  std::vector<BucketTimes> buckets = {};
  std::vector<std::size_t> order = {};  // indices of parameters in the order of their gradients

  // One line: "step 120, 12.3 ms: compute 71 %, waited for rank 1 18 %, reduce 11 %". A reduction
  // that overlaps with the computation does not count.
  std::string report() const;
};

// Settings and layout of a model. Always available.
struct DdpSettings {
  int world_size = 0, rank = 0;
  std::string module_name, backend_name, device = "cpu", dtypes, comm_hook;
  bool broadcast_buffers = true, has_sync_bn = false, find_unused_parameters = false,
       gradient_as_bucket_view = true, static_graph = false, join_uneven_inputs = false;
  // Every backward so far has used the same parameters as the one before.
  bool can_set_static_graph = true;
  std::int64_t bucket_cap_bytes = 0, num_parameter_tensors = 0, total_parameter_size_bytes = 0;
  // Buckets are laid out after the first backward. Before that, the lists are empty.
  bool has_rebuilt_buckets = false;
  std::vector<std::int64_t> rebuilt_bucket_sizes;
  std::vector<std::vector<std::size_t>> rebuilt_per_bucket_param_indices;
};

// What was measured in the last sampled backward. The first ten backwards are sampled, then one in
// `sample_rate`.
struct DdpSample {
  std::uint64_t sample_rate = 100;
  std::int64_t iteration = -1;  // from 0; -1: no sample yet
  std::int64_t num_buckets_reduced = 0, unused_parameter_size = 0;
  std::vector<std::size_t> prev_iteration_grad_ready_order_indices;
  std::chrono::nanoseconds forward_compute_time{0}, backward_compute_time{0}, backward_comm_time{0},
      backward_compute_comm_overlap_time{0};
  std::chrono::nanoseconds avg_forward_compute_time{0}, avg_backward_compute_time{0},
      avg_backward_comm_time{0}, avg_backward_compute_comm_overlap_time{0};
  RoundTimes times;
  // Time that the measurement itself took in the last backward.
  std::chrono::nanoseconds observing_time{0};
};

// PyTorch's DDP logging data, with the same field names.
struct DdpStats : DdpSettings, DdpSample {
  std::uint64_t backwards = 0;  // backwards so far
  std::uint64_t skipped = 0;    // of these, skipped because of NaN or Inf gradients
  bool has_error = false;       // whether the last backward failed
  std::string error;

  // As PyTorch prints it: by name, numbers in decimal, lists separated by spaces and commas.
  std::map<std::string, std::string> to_map() const;
};

}  // namespace convoy
