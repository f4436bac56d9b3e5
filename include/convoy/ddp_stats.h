#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace convoy {

// One bucket in one round. Times that did not happen are zero.
struct BucketTimes {
  using Time = std::chrono::steady_clock::time_point;

  std::uint64_t bytes = 0;
  Time ready;     // its last gradient was there
  Time launched;  // its reduction was started on this rank
  Time done;      // this rank had the result, or looked for it and found it
  // The rank that launched it last, if that was not this one, and how much later. -1: nobody, or
  // not known: ranks compare their clocks, which only those of backend "convoy" share.
  int waited_for = -1;
  std::chrono::nanoseconds waited{0};
};

// One round: what happened on this rank from the forward to the reduced gradients.
struct RoundTimes {
  using Time = std::chrono::steady_clock::time_point;

  std::uint64_t backward = 0;  // its number, from 1; 0: there was none
  Time last_end;               // of the round before, where this step begins; zero in the first
  Time forward_begin, forward_end;
  Time begin;     // of backward
  Time computed;  // the last gradient was there
  Time end;
  int waited_for = -1;  // the rank that computed longest, if not this one; as in BucketTimes
  std::chrono::nanoseconds waited{0};
  std::vector<BucketTimes> buckets = {};
  std::vector<std::size_t> order = {};  // numbers of parameters as their gradients came

  // "step 120, 12.3 ms: compute 71 %, waited for rank 1 18 %, reduce 11 %". Reductions that happen
  // while backward computes cost nothing and do not show.
  std::string report() const;
};

// The settings of a model and its layout: always there.
struct DdpSettings {
  int world_size = 0, rank = 0;
  std::string module_name, backend_name, device = "cpu", dtypes, comm_hook;
  bool broadcast_buffers = true, has_sync_bn = false, find_unused_parameters = false,
       gradient_as_bucket_view = true, static_graph = false, join_uneven_inputs = false;
  // No backward so far has used other parameters than the one before.
  bool can_set_static_graph = true;
  std::int64_t bucket_cap_bytes = 0, num_parameter_tensors = 0, total_parameter_size_bytes = 0;
  // Buckets are made after the first backward: before it these are empty.
  bool has_rebuilt_buckets = false;
  std::vector<std::int64_t> rebuilt_bucket_sizes;
  std::vector<std::vector<std::size_t>> rebuilt_per_bucket_param_indices;
};

// What was measured in the last sampled backward: the first ten, and then one of `sample_rate`.
struct DdpSample {
  std::uint64_t sample_rate = 100;
  std::int64_t iteration = -1;  // from 0; -1: none so far
  std::int64_t num_buckets_reduced = 0, unused_parameter_size = 0;
  std::vector<std::size_t> prev_iteration_grad_ready_order_indices;
  std::chrono::nanoseconds forward_compute_time{0}, backward_compute_time{0}, backward_comm_time{0},
      backward_compute_comm_overlap_time{0};
  std::chrono::nanoseconds avg_forward_compute_time{0}, avg_backward_compute_time{0},
      avg_backward_comm_time{0}, avg_backward_compute_comm_overlap_time{0};
  RoundTimes times;
  // What our own measuring took in that backward.
  std::chrono::nanoseconds observing_time{0};
};

// What PyTorch calls the logging data of a model, by the same names.
struct DdpStats : DdpSettings, DdpSample {
  std::uint64_t backwards = 0;  // so far
  std::uint64_t skipped = 0;    // of these, for gradients that were not finite
  bool has_error = false;       // the last backward failed
  std::string error;

  // By name, as PyTorch has it: numbers in decimal, lists separated by spaces and commas.
  std::map<std::string, std::string> to_map() const;
};

}  // namespace convoy
