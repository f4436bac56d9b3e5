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

// What a Reducer is told of its parameters beyond the tensors.
struct ParameterTraits {
  std::vector<std::string> names = {};    // empty: their numbers
  std::vector<std::size_t> sparse = {};   // whose gradients are sparse
  std::vector<std::size_t> delayed = {};  // that travel last, in buckets of their own
};

struct ReducerStats {
  std::uint64_t backwards = 0;                // that were reduced
  std::uint64_t skipped = 0;                  // of these: NonFinite::kSkip
  std::uint64_t bytes = 0;                    // of gradients in one backward
  std::chrono::nanoseconds backward_time{0};  // of the last one, from its first to its last node
  std::chrono::nanoseconds exposed_time{0};   // of that: after the last gradient was there
  std::chrono::nanoseconds copy_time{0};      // of that: into and out of buckets
  std::chrono::nanoseconds search_time{0};    // before that: for unused parameters
};

// Averages the gradients of parameters over the ranks of a group while backward computes them: for
// lists of parameters, torch::jit modules, other languages. For torch::nn modules see
// convoy/ddp.h.
//
//   convoy::Reducer reducer(module.parameters(), world);
//   auto out = reducer.prepare_for_backward({module.forward(x)})[0];
//   loss(out, y).backward();     // returns with the same gradients on every rank
//
// Every rank runs the same backwards in the same order. A backward that fails on one rank, or
// leaves a parameter out without being allowed to, throws on every rank, with names, and the next
// one works again; after a kPeerLost or kTimeout the group is broken. One thread at a time, which
// may be any.
class Reducer : public Joinable {
 public:
  class Impl;  // opaque

  // Collective: ranks compare what they were given, and throw kInvalidArgument on every rank if it
  // differs, naming the first difference. Parameters may be frozen and thawed later, on all ranks
  // alike. Values are not changed: see broadcast_coalesced().
  Reducer(std::vector<at::Tensor> parameters, ProcessGroup group, const DdpOptions& options = {},
          const ParameterTraits& traits = {});
  ~Reducer() override;  // takes its hooks off the parameters; gradients stay where they are
  Reducer(Reducer&&) noexcept;
  Reducer& operator=(Reducer&&) noexcept;

  // May be called before forward: throws what prepare_for_backward would find about the backward
  // before, while the gradients are still there.
  void before_forward();
  // To be called with what forward computed, before backward; the loss must be made of the tensors
  // it returns, which share their memory with the given ones. Does not communicate, but when their
  // backwards meet, all ranks must have called it as often; kAside: this one does not count, and
  // may be done by one rank alone, as in an evaluation.
  enum class Forward { kInStep, kAside };
  std::vector<at::Tensor> prepare_for_backward(at::TensorList outputs,
                                               Forward forward = Forward::kInStep);

  // While one of these lives, backward only adds to this rank's gradients. It counts when backward
  // runs. With `on` false it does nothing: no_sync(i % 4 != 3) in a loop that accumulates four
  // batches.
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(Reducer& reducer, bool on = true);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    std::shared_ptr<Impl> impl_;  // nullptr: it does nothing
  };
  NoSync no_sync(bool on = true) { return NoSync(*this, on); }
  bool is_paused() const;  // inside of such a scope
  // Reduces what was accumulated, without a backward. Collective.
  void sync_gradients();

  // Call it once, before the first backward. Collective. kInvalidArgument for nullptr, and with
  // another GradReduce than kMean: what gradients become is then the hook's.
  void register_comm_hook(CommHook hook);
  // As the option; before the first backward that is reduced, on all ranks: kInvalidArgument
  // afterwards. find_unused_parameters is then without effect.
  void set_static_graph();
  // Rows that the gradients of sparse parameters have on all ranks together, by name: only values
  // travel in the next round. 1-D, integers, the same on all ranks; a gradient with another row is
  // an error on all of them. kInvalidArgument for names that are none of sparse parameters.
  void set_sparse_metadata(const std::map<std::string, at::Tensor>& rows);
  // Outside of backwards, on all ranks. kInvalidArgument for a parameter that is taken already,
  // kUnsupported for one whose gradients are sparse. Does not communicate.
  void register_consumer(GradConsumer consumer);
  // `begins` is called at the start of each backward of this reducer's, `ends` when autograd is
  // through with it, also when it failed: before gradients are written back, or with kAdds, if they
  // were only added to this rank's. Once. Where parameters hold other data in between,
  // `replicas` gives what check_replicas_every compares instead, in the order of parameters.
  enum class BackwardEnd { kReduces, kAdds };
  using Replicas = std::function<std::vector<at::Tensor>()>;
  void watch_backward(std::function<void()> begins, std::function<void(BackwardEnd)> ends,
                      Replicas replicas = {});
  // From the next backward on; the kind must be the same on all ranks. Does not communicate.
  void set_reduce(GradReduce reduce);

  // Goes on with another group: after ProcessGroup::shrink(), or with ranks that join. Collective
  // in the new group: those who join make a reducer for themselves first (in a group of their own,
  // or of one) and then call it, too. Parameters, and states of sharded optimizers, become those of
  // the rank that has made most backwards, whose number in the group it returns; dead ranks' shards
  // are taken over. Gradients are undefined afterwards, buckets are laid out anew, hooks and
  // optimizers stay. kInvalidArgument on all ranks if their parameters differ; and inside of a
  // backward, a no_sync() or a Join.
  int update_process_group(ProcessGroup group);

  const std::vector<at::Tensor>& parameters() const;
  const ProcessGroup& group() const;
  // Numbers of the parameters in each bucket; empty before the end of the first backward.
  std::vector<std::vector<std::size_t>> buckets() const;
  // As of the last backward: which parameters some rank has used.
  std::vector<bool> used() const;
  const ReducerStats& stats() const;
  // The last backward was dropped: NonFinite::kSkip.
  bool skipped() const;
  // When the parts of the last round happened; see convoy/ddp_stats.h.
  const RoundTimes& timeline() const;
  // PyTorch's logging data, also after an error.
  DdpStats logging_data() const;
  // What it has of times is of one backward of so many (and of the first ten). At least 1; 100.
  void set_sample_rate(std::uint64_t rate);
  // The last round of all ranks as a Chrome trace, which rank 0 writes. Collective.
  void write_trace(const std::string& path) const;

  // For Join: rounds of reduction are its steps, and in the end parameters become the last rank's.
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override;
  const ProcessGroup& join_process_group() const override { return group(); }

 private:
  friend struct ReducerAccess;
  explicit Reducer(std::shared_ptr<Impl> impl);

  // Shared with the hooks and graphs that outlive the reducer, which find it closed.
  std::shared_ptr<Impl> impl_;
};

// Groups tensors by type and device into lists of about the given sizes, in the given order: a list
// ends with the tensor that reaches its cap, the last cap repeats. Lists come in the order of their
// first tensors. kInvalidArgument for sparse tensors.
std::vector<std::vector<std::size_t>> compute_bucket_assignment_by_size(
    at::TensorList tensors, const std::vector<std::int64_t>& caps);

struct BroadcastOptions {
  int root = 0;
  std::int64_t chunk_bytes = 32 << 20;
};
// Tensors of any types and strides become the root's, as bytes in few messages.
void broadcast_coalesced(const ProcessGroup& group, at::TensorList tensors,
                         const BroadcastOptions& options = {});

}  // namespace convoy
