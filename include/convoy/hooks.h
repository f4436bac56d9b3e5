#pragma once

#include <cstdint>
#include <memory>

#include "convoy/group.h"
#include "convoy/reducer.h"

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

// Comm hooks for DistributedDataParallel and Reducer: docs/reference/hooks.md tells which is for
// what.
//
// Those that keep something between backwards are objects: copies share it, it belongs to one model
// (parameters are known by their numbers in its reducer), and it survives every change of the
// buckets. What they keep differs between ranks: each saves and loads its own, with torch::save and
// torch::load or as a part of an archive.
namespace convoy::hooks {

// The mean over all ranks: what happens without a hook.
HookResult all_reduce(const GradBucket& bucket);
// Gradients stay this rank's own.
HookResult noop(const GradBucket& bucket);

// The mean of gradients rounded to 16 bits, summed in f32, and rounded again. Where ranks share
// memory this happens in registers and costs what all_reduce costs; elsewhere gradients are
// encoded, and half the bytes travel. (A backend that is not ours sums in 16 bits, and gets
// gradients that are divided before.) Gradients that are of 16 bits already go as they are.
HookResult fp16_compress(const GradBucket& bucket);
HookResult bf16_compress(const GradBucket& bucket);

// Around another hook, which sees the bucket in 16 bits and sends what it sends in 16 bits.
CommHook fp16_compress_wrapper(CommHook hook);
CommHook bf16_compress_wrapper(CommHook hook);

struct Quantize8Options {
  std::int64_t block = 1024;   // consecutive elements that share a scale; at least 8
  bool error_feedback = true;  // what rounding loses is added to the next gradient
};

// 8 bits for each element and 4 bytes for each block: a quarter of the bytes. Parts are exchanged,
// averaged in f32 by their owners, quantized again and gathered. Needs a backend with all_to_all
// (convoy, mpi, Gloo, NCCL). A block with a NaN or an infinity becomes NaN. Keeps an f32 for each
// element, if it feeds errors back.
class Quantize8 {
 public:
  // kInvalidArgument for a block that is too small.
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
  std::uint64_t start_power_sgd_iter = 1000;  // so many backwards are averaged as they are
  double min_compression_rate = 2;            // parameters below it are averaged as they are
  bool use_error_feedback = true;
  bool warm_start = true;                // each approximation begins with the one before
  double orthogonalization_epsilon = 0;  // added to norms, for gradients close to zero
  std::uint64_t random_seed = 0;         // the same on all ranks
};

// A gradient of n x m elements travels as two factors of n x r and m x r ones (Vogels et al.,
// PowerSGD). Keeps a copy of each compressed gradient, if it feeds errors back, and of its m x r
// factor.
class PowerSgd {
 public:
  // kInvalidArgument for a rank or rate below 1, or an epsilon below 0.
  explicit PowerSgd(const PowerSgdOptions& options = {});
  HookResult operator()(const GradBucket& bucket) const;

  // Of the last backward: elements of its gradients, and those that travelled for them.
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
  std::uint64_t start_local_sgd_iter = 1000;  // so many backwards are averaged over all ranks
  // From then on over these ranks, such as those of one host; none: gradients stay this rank's own.
  ProcessGroup subgroup = {};
};

// The part of post-local SGD that concerns gradients; a ModelAverager (convoy/averager.h) does the
// rest.
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

// torch::save(hook, ...) and torch::load(hook, ...).
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
