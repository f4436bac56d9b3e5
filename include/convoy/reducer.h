#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "convoy/ddp_options.h"
#include "convoy/ddp_stats.h"
#include "convoy/grad_bucket.h"
#include "convoy/group.h"
#include "convoy/join.h"

namespace convoy {

// Properties of parameters that their tensors do not tell.
struct ParameterTraits {
  std::vector<std::string> names = {};    // empty: parameters are named by number
  std::vector<std::size_t> sparse = {};   // numbers of those with sparse gradients
  std::vector<std::size_t> delayed = {};  // reduced last, in buckets of their own
};

struct ReducerStats {
  std::uint64_t backwards = 0;                // backwards that were reduced
  std::uint64_t skipped = 0;                  // of these, dropped: NonFinite::kSkip
  std::uint64_t bytes = 0;                    // gradient bytes of one backward
  std::chrono::nanoseconds backward_time{0};  // the last one, from first to last node
  std::chrono::nanoseconds exposed_time{0};   // of that, after the last gradient
  std::chrono::nanoseconds copy_time{0};      // of that, copying to and from buckets
  std::chrono::nanoseconds search_time{0};    // before that, finding unused parameters
};

// Averages the gradients of parameters over the ranks of a group while backward computes them. For
// lists of parameters, torch::jit modules and other languages. For torch::nn modules see
// convoy/ddp.h.
//
//   convoy::Reducer reducer(module.parameters(), world);
//   auto out = reducer.prepare_for_backward({module.forward(x)})[0];
//   loss(out, y).backward();     // returns with the same gradients on every rank
//
// All ranks must run the same backwards in the same order. backward() blocks until the gradients
// are reduced. If a backward fails on one rank, or leaves out a parameter that must be used, it
// throws on all ranks, with names, and the next backward works again. After a kPeerLost or kTimeout
// the group is broken. Not thread-safe: one thread at a time, but it need not be the same one.
class Reducer : public Joinable {
 public:
  class Impl;  // opaque

  // Collective: ranks compare their arguments. If these differ, it throws kInvalidArgument on all
  // ranks and names the first difference. Parameters may be frozen and unfrozen later, on all ranks
  // alike. The values of parameters are not changed: see broadcast_coalesced().
  Reducer(std::vector<at::Tensor> parameters, ProcessGroup group, const DdpOptions& options = {},
          const ParameterTraits& traits = {});
  ~Reducer() override;  // removes its hooks from the parameters; gradients stay
  Reducer(Reducer&&) noexcept;
  Reducer& operator=(Reducer&&) noexcept;

  // Optional, before forward: throws what prepare_for_backward() would throw about the previous
  // backward, while its gradients are still there.
  void before_forward();
  // Call it with the outputs of forward, before backward, and compute the loss from the tensors
  // that it returns. These share their memory with `outputs`. It does not communicate, but all
  // ranks must have called it equally often when their backwards meet. Forward::kAside: the call is
  // not counted, and one rank may make it alone, for example in an evaluation.
  enum class Forward { kInStep, kAside };
  std::vector<at::Tensor> prepare_for_backward(at::TensorList outputs,
                                               Forward forward = Forward::kInStep);

  // While one of these lives, backward only accumulates into this rank's gradients. What counts is
  // when backward runs, not forward. With `on` false it does nothing: no_sync(i % 4 != 3) in a loop
  // that accumulates four batches.
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(Reducer& reducer, bool on = true);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    std::shared_ptr<Impl> impl_;  // nullptr: `on` was false
  };
  NoSync no_sync(bool on = true) { return NoSync(*this, on); }
  bool is_paused() const;  // true inside such a scope
  // Collective: reduces the accumulated gradients, without a backward. Throws kInvalidArgument
  // inside a backward.
  void sync_gradients();

  // Collective. Call it once, before the first backward. Throws kInvalidArgument for an empty hook,
  // for a second one, after a backward, or if GradReduce is not kMean: with a hook, the hook
  // decides how gradients are combined.
  void register_comm_hook(CommHook hook);
  // As DdpOptions::static_graph. Call it on all ranks, before the first backward that is reduced;
  // afterwards it throws kInvalidArgument. find_unused_parameters then has no effect.
  void set_static_graph();
  // Sets the rows that the gradients of sparse parameters have on all ranks together, by name. Then
  // only values travel in the next round. Rows are 1-D integer tensors, the same on all ranks; a
  // gradient with another row is an error on all ranks. Throws kInvalidArgument for a name that is
  // not a sparse parameter's, and for rows out of range.
  void set_sparse_metadata(const std::map<std::string, at::Tensor>& rows);
  // Lets a consumer take gradients in place of `.grad`. Call it outside backward, on all ranks.
  // Does not communicate. Throws kInvalidArgument for a parameter that has a consumer already,
  // kUnsupported for one with sparse gradients.
  void register_consumer(GradConsumer consumer);
  // Calls `begins` at the start of each backward of this reducer. Calls `ends` once when autograd
  // has finished that backward, also if it failed: with kReduces before gradients are written back,
  // with kAdds if they were only accumulated. If parameters hold other data in between, `replicas`
  // returns the tensors that check_replicas_every compares instead, in the order of parameters.
  enum class BackwardEnd { kReduces, kAdds };
  using Replicas = std::function<std::vector<at::Tensor>()>;
  void watch_backward(std::function<void()> begins, std::function<void(BackwardEnd)> ends,
                      Replicas replicas = {});
  // Applies from the next backward on. All ranks must set the same kind. Does not communicate.
  // Throws kInvalidArgument inside a backward, and for another kind than kMean if there is a comm
  // hook.
  void set_reduce(GradReduce reduce);

  // Continues with another group: after ProcessGroup::shrink(), or with ranks that join. Collective
  // in the new group. A rank that joins first makes a reducer of its own (in another group, or in a
  // group of one) and then calls this too. Parameters and states of sharded optimizers become those
  // of the rank with the most backwards; its number in the group is returned. Shards of dead ranks
  // are taken over. Afterwards gradients are undefined and buckets are laid out anew; hooks and
  // optimizers stay. Throws kInvalidArgument on all ranks if their parameters differ, and inside a
  // backward, a no_sync() or a Join.
  int update_process_group(ProcessGroup group);

  const std::vector<at::Tensor>& parameters() const;
  const ProcessGroup& group() const;
  // Numbers of the parameters in each bucket; empty before the end of the first backward.
  std::vector<std::vector<std::size_t>> buckets() const;
  // Which parameters at least one rank used in the last backward.
  std::vector<bool> used() const;
  const ReducerStats& stats() const;
  // True if the last backward was dropped: NonFinite::kSkip.
  bool skipped() const;
  // Times of the parts of the last round: see convoy/ddp_stats.h.
  const RoundTimes& timeline() const;
  // PyTorch's logging data. Also available after an error.
  DdpStats logging_data() const;
  // Times in logging_data() are taken in the first ten backwards, then in one of every `rate`.
  // Default: 100. Throws kInvalidArgument for 0.
  void set_sample_rate(std::uint64_t rate);
  // Collective: rank 0 writes the last round of all ranks as a Chrome trace.
  void write_trace(const std::string& path) const;

  // For Join: its steps are rounds of reduction. At the end parameters become those of the rank
  // that had data last.
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override;
  const ProcessGroup& join_process_group() const override { return group(); }

 private:
  friend struct ReducerAccess;
  explicit Reducer(std::shared_ptr<Impl> impl);

  // Shared with hooks and graphs, which may outlive the reducer: they find it closed then.
  std::shared_ptr<Impl> impl_;
};

// Groups tensors by type and device into lists of about the given sizes, in the given order. A list
// ends with the tensor that reaches its cap; the last cap repeats. Lists are ordered by their first
// tensors. Throws kInvalidArgument for sparse tensors, and for no or non-positive caps.
std::vector<std::vector<std::size_t>> compute_bucket_assignment_by_size(
    at::TensorList tensors, const std::vector<std::int64_t>& caps);

struct BroadcastOptions {
  int root = 0;
  std::int64_t chunk_bytes = 32 << 20;
};
// Collective: overwrites the tensors with those of the root, in few messages. They may have any
// types and strides. Throws kInvalidArgument for a tensor that is undefined, sparse or on device
// meta, and for a bad root or chunk_bytes.
void broadcast_coalesced(const ProcessGroup& group, at::TensorList tensors,
                         const BroadcastOptions& options = {});

}  // namespace convoy
