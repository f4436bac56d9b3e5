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

// How the gradients of all ranks are combined.
class GradReduce {
 public:
  // Mean or sum over all ranks.
  static const GradReduce kMean;
  static const GradReduce kSum;
  // Weighted mean: sum(samples * gradient) / sum(samples). It is the gradient of the mean over all
  // samples if each rank's loss is the mean over its own samples. Set it before each backward with
  // Reducer::set_reduce(). A rank with 0 samples adds nothing. Backward throws kInvalidArgument if
  // no rank has samples.
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

// When buckets are reduced: as soon as they are complete (early), or at the end of backward (late).
// kAuto: late if the backend is "convoy" and the ranks of this host use all CPU cores, otherwise
// early. CONVOY_DDP_LAUNCH overrides kAuto.
enum class BucketLaunch { kAuto, kEarly, kLate };

// What to do about NaN or Inf gradients. Other than with kIgnore, gradients are checked before they
// are reduced. kRaise: that backward throws on all ranks, naming rank and parameter. kSkip: all
// ranks drop the gradients of that backward; `.grad` is undefined, so that optimizers do nothing.
// See Reducer::skipped().
enum class NonFinite { kIgnore, kRaise, kSkip };

// When buffers are synchronized.
enum class BufferSync { kBeforeForward, kAfterForward };

// Parameters whose gradients are reduced over another group than the model's, such as experts that
// only some ranks have. Each rank lists the groups of its own parameters.
struct ParameterGroup {
  std::vector<std::string> names;
  ProcessGroup group;
};

// Options of DistributedDataParallel, and of Reducer as far as they need no module.
struct DdpOptions {
  // Approximate size of a bucket: the gradients that are reduced together. Unset: 25 MB, but 1 MB
  // for the first bucket, so that reduction starts early. A list sets a size for each bucket; the
  // last one repeats. The list overrides bucket_cap_mb.
  std::optional<double> bucket_cap_mb = {};
  std::vector<double> bucket_cap_mb_list = {};
  // Before each backward, search the graph for parameters that the outputs do not depend on, so
  // that buckets do not wait for them. A parameter that no rank has used keeps its gradient.
  bool find_unused_parameters = false;
  // The graph never changes: parameters that the first backward does not use are never used.
  bool static_graph = false;
  // `.grad` uses the memory of the buckets. false: gradients are copied in and out, and need twice
  // the memory.
  bool gradient_as_bucket_view = true;
  // Buckets that no rank uses are not reduced. Costs one small collective at the start of a
  // backward.
  bool skip_all_reduce_unused_params = false;
  GradReduce reduce = GradReduce::kMean;
  BucketLaunch launch = BucketLaunch::kAuto;
  NonFinite nonfinite = NonFinite::kIgnore;
  // Ranks compare their parameters in one of this many backwards. If they differ, all ranks throw;
  // the text names the first differing parameter and the ranks. 0: never; but 100 if
  // CONVOY_DEBUG=detail.
  std::uint64_t check_replicas_every = 0;

  // --- these need a module: a Reducer throws kInvalidArgument for a list, and ignores the rest ---
  bool init_sync = true;             // ranks start with the parameters and buffers of rank 0
  bool forward_sync_buffers = true;  // in training mode, rank 0's buffers are copied to all ranks
  BufferSync buffer_sync = BufferSync::kBeforeForward;
  // Names of parameters and buffers that are not synchronized: each rank keeps its own.
  std::vector<std::string> ignore = {};
  // Names of parameters that are reduced after all others, in buckets of their own.
  std::vector<std::string> delay_all_reduce_named_params = {};
  std::vector<ParameterGroup> parameter_groups = {};
  // Compute and communicate in lower precision than that of the parameters. For a Reducer: only
  // reduce_dtype may be set.
  std::optional<MixedPrecision> mixed_precision = {};

  // All options except parameter_groups as lines of text, for a checkpoint or another process.
  std::string to_text() const;
  // Throws kInvalidArgument if `text` was not written by to_text().
  static DdpOptions from_text(const std::string& text);
  // The same in an archive, under the key "convoy_ddp_options". load() throws kInvalidArgument if
  // the archive has no such key.
  void save(torch::serialize::OutputArchive& archive) const;
  static DdpOptions load(torch::serialize::InputArchive& archive);
};

}  // namespace convoy
