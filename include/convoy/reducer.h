#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "convoy/ddp_stats.h"
#include "convoy/group.h"
#include "convoy/join.h"
#include "convoy/work.h"

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

// Gradients that travel together, as a comm hook sees them: complete, not divided. Cheap to copy;
// valid until the backward ends.
class GradBucket {
 public:
  // Buckets are numbered in the order in which hooks are called: the same on all ranks, and the
  // same at every step until the layout changes (parameters frozen or thawed, another group).
  std::size_t index() const { return index_; }
  std::size_t count() const { return count_; }
  // Number of this backward among all that this reducer reduced, also those that failed: 1, 2, ...,
  // the same on all ranks.
  std::uint64_t backward() const { return backward_; }
  // No bucket after it goes through the hook in this backward. (In the one that notices thawed
  // parameters, those follow in buckets of their own.)
  bool is_last() const { return is_last_; }
  // All gradients one after the other: 1-D, contiguous.
  const at::Tensor& buffer() const { return buffer_; }
  // By parameter, as it is shaped and strided, in the buffer's memory.
  std::vector<at::Tensor> gradients() const;
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  // Their numbers in the reducer: what a hook keeps by parameter survives a change of layout.
  const std::vector<std::size_t>& indices() const { return indices_; }
  // The group for this hook's operations. It is the hook's own: a hook that fails on one rank does
  // not leave the others waiting. What is done on another group has no such protection.
  const ProcessGroup& group() const { return group_; }
  // The same bucket with other contents, for a hook that wraps another. As many elements.
  GradBucket with(at::Tensor buffer) const;

 private:
  friend struct BucketAccess;

  std::size_t index_ = 0, count_ = 1;
  std::uint64_t backward_ = 1;
  bool is_last_ = true;
  at::Tensor buffer_;
  std::vector<at::Tensor> slots_;
  std::vector<at::Tensor> parameters_;
  std::vector<std::size_t> indices_;
  ProcessGroup group_;
};

// What a comm hook returns: the reduced buffer, now or later.
class HookResult {
 public:
  HookResult(at::Tensor result);  // NOLINT(google-explicit-constructor): return bucket.buffer();
  // When the work is done, this tensor holds the result.
  HookResult(Work work, at::Tensor result);
  // When the work is done, `finish` gives the result. It is called once, in the backward's thread,
  // in the order of the buckets.
  HookResult(Work work, std::function<at::Tensor()> finish);
  // Of a tensor, or of a list that begins with one.
  HookResult(
      c10::intrusive_ptr<c10::ivalue::Future> future);  // NOLINT(google-explicit-constructor)

  // One more step, after the others.
  HookResult then(std::function<at::Tensor(at::Tensor)> step) &&;
  // Blocks. Once.
  at::Tensor wait();

 private:
  std::function<at::Tensor()> finish_;
};

// Called once for each bucket, in their order, in the backward's thread. What it returns must have
// the buffer's number of elements and type; it replaces the gradients as it is: nothing is divided.
// An exception fails this backward on every rank.
using CommHook = std::function<HookResult(const GradBucket&)>;

// Takes the gradients of some parameters when they have been reduced, in place of `.grad`; an
// optimizer, for example. See Reducer::register_consumer().
struct GradConsumer {
  std::vector<bool> takes;  // by number of the parameter; what is beyond its end is not taken
  bool keeps = false;       // gradients become `.grad` all the same; otherwise that is undefined
  // Called at the end of each backward that went well on all ranks, with all its buckets and with
  // the parameters that some rank has used: gradients of others have no meaning. Must do the same
  // on all ranks. If it throws, the group is aborted.
  std::function<void(const std::vector<GradBucket>& buckets, const std::vector<bool>& used)>
      function;
};

// When buckets travel: as soon as they are complete, or at the end of backward. kAuto: early, if
// this host has cores that do not compute.
enum class BucketLaunch { kAuto, kEarly, kLate };

// Gradients with values that are infinite or no numbers, which are looked for before they are
// reduced: kRaise is an error in that backward, on all ranks, with rank and parameter. kSkip drops
// all gradients of that backward, on all ranks: they are undefined, and optimizers leave the model
// as it is; Reducer::skipped() tells.
enum class NonFinite { kIgnore, kRaise, kSkip };

struct ReducerOptions {
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
  // Floating-point gradients travel in this type, whatever theirs is; `.grad` becomes the
  // parameters' own type.
  std::optional<at::ScalarType> reduce_dtype = {};
  std::vector<std::string> names = {};       // of the parameters; empty: their numbers
  std::vector<std::size_t> sparse = {};      // parameters whose gradients are sparse
  std::vector<std::size_t> delayed = {};     // these travel last, in buckets of their own
  std::vector<std::string> must_agree = {};  // what else has to be equal on all ranks
  std::string error = {};                    // not empty: construction throws this, on all ranks
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
  Reducer(std::vector<at::Tensor> parameters, ProcessGroup group, ReducerOptions options = {});
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

  // While one of these lives, backward only adds to this rank's gradients. Read when backward runs.
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(Reducer& reducer);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    std::shared_ptr<Impl> impl_;
  };
  NoSync no_sync() { return NoSync(*this); }
  bool is_paused() const;  // inside of such a scope
  // Reduces what was accumulated, without a backward. Collective.
  void sync_gradients();

  // Before the first backward, once. Collective. kInvalidArgument for nullptr, and with another
  // GradReduce than kMean: what gradients become is then the hook's.
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
