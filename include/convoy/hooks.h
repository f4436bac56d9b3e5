#pragma once

#include <cstdint>
#include <memory>

#include "convoy/group.h"
#include "convoy/reducer.h"

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

// Comm hooks for DistributedDataParallel and Reducer. docs/reference/hooks.md says when to use
// which.
//
// A hook replaces the all-reduce of a bucket. It runs on the thread of the backward. Hooks that
// keep state between backwards are objects. Copies of such an object share its state. It belongs to
// one model, because state is stored by parameter index, and it survives every change of the
// buckets. State differs between ranks: each rank saves and loads its own, with torch::save and
// torch::load or as part of an archive. load() throws kInvalidArgument if the archive was not
// written by save(). Hook objects are not thread-safe.
namespace convoy::hooks {

// The mean over all ranks, as without a hook.
HookResult all_reduce(const GradBucket& bucket);
// Does not communicate: each rank keeps its own gradients.
HookResult noop(const GradBucket& bucket);

// Rounds gradients to 16 bits, averages them in f32, and rounds the mean again. If ranks share
// memory, rounding happens in registers, and the cost is that of all_reduce. Otherwise gradients
// are sent in 16 bits, which halves the traffic. (A foreign backend sums in 16 bits, so gradients
// are divided before they are sent.) Gradients that have 16 bits already are not converted.
HookResult fp16_compress(const GradBucket& bucket);
HookResult bf16_compress(const GradBucket& bucket);

// Wraps another hook: it gets the bucket in 16 bits, so what it sends has 16 bits too. Throws
// kInvalidArgument for an empty function.
CommHook fp16_compress_wrapper(CommHook hook);
CommHook bf16_compress_wrapper(CommHook hook);

struct Quantize8Options {
  std::int64_t block = 1024;   // elements that share a scale: from 8 to 2^24
  bool error_feedback = true;  // rounding errors are added to the next gradient
};

// Sends 8 bits for each element and 4 bytes for each block: a quarter of the traffic. Ranks
// exchange parts of the bucket, average them in f32, quantize the mean and gather it. Needs a
// backend with all_to_all (convoy, mpi, Gloo, NCCL). A block with NaN or Inf becomes NaN. With
// error feedback it keeps one f32 for each element.
class Quantize8 {
 public:
  // Throws kInvalidArgument if the block size is out of range.
  explicit Quantize8(const Quantize8Options& options = {});
  HookResult operator()(const GradBucket& bucket) const;

  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive) const;

 private:
  struct State;
  std::shared_ptr<State> state_;  // of all copies
};

struct PowerSgdOptions {
  int matrix_approximation_rank = 1;
  std::uint64_t start_power_sgd_iter = 1000;  // number of first backwards that are not compressed
  double min_compression_rate = 2;            // parameters that compress less are not compressed
  bool use_error_feedback = true;
  bool warm_start = true;                // start from the approximation of the backward before
  double orthogonalization_epsilon = 0;  // added to norms; for gradients near zero
  std::uint64_t random_seed = 0;         // must be the same on all ranks
};

// PowerSGD (Vogels et al.): sends two factors of n x r and m x r elements for a gradient of n x m
// elements. With error feedback it keeps a copy of each compressed gradient. With warm start it
// keeps the m x r factors.
class PowerSgd {
 public:
  // Throws kInvalidArgument for a rank or rate below 1, or an epsilon below 0.
  explicit PowerSgd(const PowerSgdOptions& options = {});
  HookResult operator()(const GradBucket& bucket) const;

  // Of the last backward: elements of its gradients, and elements sent for them.
  struct Traffic {
    std::uint64_t gradients = 0, sent = 0;
  };
  Traffic traffic() const;

  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive) const;

 private:
  struct State;
  std::shared_ptr<State> state_;  // of all copies
};

struct PostLocalSgdOptions {
  std::uint64_t start_local_sgd_iter = 1000;  // number of first backwards with all ranks
  // After that, gradients are averaged over this group, such as the ranks of one host. Empty: each
  // rank keeps its own.
  ProcessGroup subgroup = {};
};

// Post-local SGD: this hook does the gradients, a ModelAverager (convoy/averager.h) the parameters.
class PostLocalSgd {
 public:
  explicit PostLocalSgd(const PostLocalSgdOptions& options = {});
  HookResult operator()(const GradBucket& bucket) const;

  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive) const;

 private:
  struct State;
  std::shared_ptr<State> state_;  // of all copies
};

// For torch::save(hook, ...) and torch::load(hook, ...).
template <class Hook>
concept SavedHook = requires(const Hook& hook, torch::serialize::OutputArchive& out,
                             torch::serialize::InputArchive& in) {
  hook.save(out);
  hook.load(in);
};
template <SavedHook Hook>
torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                            const Hook& hook) {
  hook.save(archive);
  return archive;
}
template <SavedHook Hook>
torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive, Hook& hook) {
  hook.load(archive);
  return archive;
}

}  // namespace convoy::hooks
