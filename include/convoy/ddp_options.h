#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "convoy/group.h"
#include "convoy/mixed_precision.h"

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace convoy {

// How the gradients of all ranks become one.
class GradReduce {
 public:
  static const GradReduce kMean;
  static const GradReduce kSum;
  // Sum of samples * gradient over sum of samples: the gradient of the mean over all samples, if
  // each rank's loss is the mean over its own. Set it before each backward: Reducer::set_reduce().
  // 0 samples add nothing; none on all ranks is kInvalidArgument in that backward.
  static constexpr GradReduce weighted(double samples) { return {Kind::kWeighted, samples}; }

  enum class Kind : std::uint8_t { kMean, kSum, kWeighted };
  constexpr Kind kind() const { return kind_; }
  constexpr double samples() const { return samples_; }

 private:
  constexpr GradReduce(Kind kind, double samples) : kind_(kind), samples_(samples) {}

  Kind kind_;
  double samples_;
};
inline constexpr GradReduce GradReduce::kMean{Kind::kMean, 1};
inline constexpr GradReduce GradReduce::kSum{Kind::kSum, 1};

// When buckets travel: as soon as they are complete, or at the end of backward. kAuto: early, if
// this host has cores that do not compute.
enum class BucketLaunch { kAuto, kEarly, kLate };

// What to do about NaN or Inf gradients, which are checked for before they are reduced. kRaise: an
// error in that backward on all ranks, naming rank and parameter. kSkip: drops the gradients of
// that backward on all ranks; they are undefined, so optimizers do nothing. See Reducer::skipped().
enum class NonFinite { kIgnore, kRaise, kSkip };

enum class BufferSync { kBeforeForward, kAfterForward };

// Parameters whose gradients are reduced over another group than the model's: experts that only
// some ranks have. A rank names those that it has.
struct ParameterGroup {
  std::vector<std::string> names;
  ProcessGroup group;
};

// Options of DistributedDataParallel; of a Reducer, too, as far as they need no module.
struct DdpOptions {
  // Gradients travel in buckets of about this size. Unset: 25, but the first 1, so that it starts
  // early. A list gives a cap to each bucket; its last repeats.
  std::optional<double> bucket_cap_mb = {};
  std::vector<double> bucket_cap_mb_list = {};
  // Look before each backward which parameters its outputs reach, so that others do not hold up
  // their bucket; what no rank has used keeps its gradient as it was.
  bool find_unused_parameters = false;
  // The graph never changes: what the first backward does not use is never used.
  bool static_graph = false;
  // Gradients live in the buckets. false: they are copied in and out, and need twice the memory.
  bool gradient_as_bucket_view = true;
  // Buckets that no rank uses do not travel. One small collective more at the start of a backward.
  bool skip_all_reduce_unused_params = false;
  GradReduce reduce = GradReduce::kMean;
  BucketLaunch launch = BucketLaunch::kAuto;
  NonFinite nonfinite = NonFinite::kIgnore;
  // In every so many backwards, ranks compare their parameters; a difference is an error on all of
  // them, which names the first parameter and the ranks. 0: never, but with CONVOY_DEBUG=detail
  // 100.
  std::uint64_t check_replicas_every = 0;

  // --- these need a module: kInvalidArgument for a Reducer, or without effect ---
  bool init_sync = true;             // ranks begin with rank 0's parameters and buffers
  bool forward_sync_buffers = true;  // in training, buffers become rank 0's
  BufferSync buffer_sync = BufferSync::kBeforeForward;
  // Names of parameters and buffers that stay this rank's own.
  std::vector<std::string> ignore = {};
  // Parameters that travel after all others, in buckets of their own.
  std::vector<std::string> delay_all_reduce_named_params = {};
  std::vector<ParameterGroup> parameter_groups = {};
  // Compute and communicate with less than the parameters' own precision. For a Reducer: only
  // reduce_dtype.
  std::optional<MixedPrecision> mixed_precision = {};

  // All of it but parameter_groups, for a checkpoint or another process: lines of text.
  std::string to_text() const;
  // kInvalidArgument if that is not what to_text() writes.
  static DdpOptions from_text(const std::string& text);
  // The same in an archive, under a name of our own.
  void save(torch::serialize::OutputArchive& archive) const;
  static DdpOptions load(torch::serialize::InputArchive& archive);
};

}  // namespace convoy
