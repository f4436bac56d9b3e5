#pragma once

#include <chrono>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/call_scope.h"
#include "coll/report.h"
#include "convoy/join.h"
#include "convoy/reducer.h"
#include "ddp/bucket.h"
#include "ddp/forwards.h"
#include "ddp/gradient_home.h"
#include "ddp/join_driver.h"
#include "ddp/norm_weight.h"
#include "ddp/parameter_state.h"
#include "ddp/round.h"
#include "ddp/round_observer.h"
#include "ddp/shard_port.h"
#include "ddp/verdict.h"
#include "os/fork_guard.h"
#include "tensor/births.h"

namespace convoy {

// kInvalidArgument for a number of samples that is none.
void check_weight(const GradReduce& reduce);
// What a rank counts: 1, if gradients are not weighted.
inline double samples_of(const GradReduce& reduce) {
  return reduce.kind() == GradReduce::Kind::kWeighted ? reduce.samples() : 1;
}

// What a reducer is made with. A model says more than the public constructor takes.
struct ReducerSetup : DdpOptions {
  explicit ReducerSetup(const DdpOptions& options) : DdpOptions(options) {}

  // The type in which floating-point gradients travel, whatever theirs is.
  std::optional<at::ScalarType> reduce_dtype() const {
    if (!mixed_precision) return std::nullopt;
    return mixed_precision->reduce_dtype ? mixed_precision->reduce_dtype
                                         : mixed_precision->param_dtype;
  }

  ParameterTraits traits = {};
  std::vector<std::string> must_agree = {};  // what else has to be equal on all ranks
  std::string error = {};                    // not empty: construction throws this, on all ranks
};

// Words: a *backward* is one call of autograd's backward that comes by a sink of this reducer. A
// *round* is one reduction of all gradients: a backward, or several that complete each other. All
// ranks issue the same operations in a round, whatever happens to them:
//
//   begin     what the options need: the hook's group, the sum of samples, the map of used ones
//   order     rank 0's order of arrival (first round only; buckets are made from it)
//   buckets   0, 1, 2, ...: as soon as complete, the rest at the end of the backward
//   verdict   how it went, which parameters were used and which are trained
//             (if these are others than in the buckets: buckets and verdict of the thawed ones)
//   sparse    gradients that some rank has
//
// so that a rank whose backward fails goes through the rest of it and the others hear of it.
// Autograd runs one node of a graph at a time and orders them: nothing here is locked.
class Reducer::Impl : public std::enable_shared_from_this<Reducer::Impl> {
 public:
  Impl(std::vector<at::Tensor> parameters, ProcessGroup group, ReducerSetup options);

  // To be called when the object is owned by a shared_ptr, and after each forward.
  void hook_up();
  void take_hooks_off();

  // Ranks that do not do the same: reducer_recover.cpp.
  void enlist();
  // This rank's forward threw, and it will not come to the backward of the others: they are told by
  // its next forward.
  void owe(const std::string& why);
  // Runs `sync`, the collective of a forward that all ranks run; nullptr: there is none, and ranks
  // meet only if this one has something to tell. Others may be in a backward that this rank does
  // not come to: then that fails on all of them, and this forward goes on. What another rank has to
  // tell is thrown.
  void meet_in_forward(const char* what, const std::function<void()>& sync);

  // kUnsupported in a forked child, where gradients lie in memory that is the rank's, too.
  void check_process(const char* operation) const;
  // A round that was left open for an output that never came is an error now.
  void before_forward();
  std::vector<at::Tensor> after_forward(at::TensorList outputs, Forward forward);
  void sync_gradients();
  void register_comm_hook(CommHook hook);
  void register_consumer(GradConsumer consumer);
  void watch_backward(std::function<void()> begins, std::function<void(BackwardEnd)> ends,
                      Replicas replicas) {
    users_.begins = std::move(begins);
    users_.ends = std::move(ends);
    users_.replicas = std::move(replicas);
  }
  void set_reduce(GradReduce reduce);
  void pause(int change);

  // Sharded optimizers, and change of group: reducer_shards.cpp.
  // kInvalidArgument or kUnsupported if these parameters cannot be taken.
  void check_port(const std::vector<bool>& takes) const;
  // Collective.
  void attach(std::shared_ptr<ShardPort> port);
  void detach(const ShardPort& port) noexcept;
  struct BucketPlace {
    const Bucket* bucket = nullptr;  // nullptr: in none
    std::size_t slot = 0;
  };
  BucketPlace place_of(std::size_t index) const;
  bool is_busy() const { return round_.open || in_backward_; }
  bool is_late() const { return launches_late_; }
  const std::string& name_of(std::size_t index) const { return parameters_[index].name; }
  // True if this rank has added to its gradient since the last round.
  bool is_unreduced(std::size_t index) const { return parameters_[index].used; }
  // kInvalidArgument if the group cannot be changed now.
  void prepare_change();
  // When no rank of the next group works in this one any more.
  void leave_group();
  // What users have registered with the reducer in whose place this one comes. Collective. Returns
  // the rank that has made most backwards, whose parameters all have now.
  int take_over(const Impl& old);

  // Setters, statistics: reducer_checks.cpp, reducer_sparse.cpp.
  void set_static_graph();
  void set_sparse_metadata(const std::map<std::string, at::Tensor>& rows);
  void follow(const std::shared_ptr<Impl>& other) { users_.followers.push_back(other); }
  Timeline& timeline() { return observer_.timeline(); }
  DdpStats logging_data() const;
  std::vector<std::string> bucket_names() const;
  bool skipped() const { return observer_.skipped(); }

  // What a Join adds to rounds: reducer_join.cpp.
  void set_join(std::unique_ptr<JoinPort> port);
  // A round to which this rank adds nothing but what it has not reduced yet.
  void shadow_round(const JoinStep& step);
  bool is_in_part() const { return join_.is_part(); }

  // Distributed backward passes: reducer_context.cpp. See GradientLoan.
  void lend(const ContextGradients& context);
  ContextGradients lent() const;
  void give_back() noexcept;
  bool is_paused() const { return paused_ > 0; }

  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  const ProcessGroup& group() const { return group_; }
  const ReducerSetup& options() const { return options_; }
  const std::vector<Bucket>& buckets() const { return layout_.buckets; }
  const std::shared_ptr<NormWeight>& norm_weight() const { return norm_weight_; }
  const std::vector<bool>& used() const { return verdict_.used(); }
  const ReducerStats& stats() const { return observer_.stats(); }

 private:
  using Clock = Round::Clock;

  // What others have asked of it: a hook, optimizers, who watches.
  struct Users {
    CommHook hook;
    ProcessGroup hook_group;  // none: to be made by the next round
    std::vector<GradConsumer> consumers;
    std::vector<std::shared_ptr<ShardPort>> ports;
    std::function<void()> begins;
    std::function<void(BackwardEnd)> ends;
    Replicas replicas;
    std::vector<std::weak_ptr<Impl>> followers;  // are paused with this one
  };
  // Which gradients travel together. The same on all ranks.
  struct Layout {
    std::vector<std::int64_t> caps;
    std::vector<Bucket> buckets;
    std::vector<std::size_t> order;  // all parameters as they arrive; empty before the first round
    bool guessed = false;            // because rank 0 had seen no gradients
    bool changed = false;            // parameters were frozen or thawed since buckets were made
  };

  // --- what it is made of: reducer_make.cpp ---
  void check();
  std::vector<std::string> description() const;

  // --- forwards and backwards, where a round opens: reducer_backward.cpp ---
  void take_off(ParameterState& parameter);
  c10::intrusive_ptr<Sink> make_sink(std::uint64_t forward, std::shared_ptr<ForwardFate> fate);
  bool enter(Sink* sink);
  void open(const Sink* sink);
  void presume_unused(const Sink* sink);
  bool sums_once() const;
  void set_sums_aside();
  void on_gradient(std::size_t index, bool defined);
  void leave();
  void end();
  void failed(const std::string& cause);
  std::vector<std::size_t> missing() const;
  std::string names_of(const std::vector<std::size_t>& indices) const;
  std::string missing_text(const std::vector<std::size_t>& indices) const;

  // --- a gradient into its bucket, and that on its way: reducer_gradients.cpp ---
  void make_ready(std::size_t index);
  void copy_in(std::size_t index);
  void enter_births();
  bool can_stay(std::size_t index) const;
  void settle(std::size_t index);
  void add_nothing(std::size_t index);
  void launch_complete_ones();
  void launch(std::size_t bucket);
  template <class Function>
  void guarded(std::size_t bucket, Function function);
  void move_shared_ones(const Bucket& bucket);
  HookResult start(std::size_t bucket);
  bool travels_in_pieces() const;
  std::vector<at::Tensor> pieces_of(const Bucket& bucket) const;

  // --- the end of a round: reducer_end.cpp ---
  // To the end, whatever it is; throws unless all ranks are fine.
  void complete(Ending outcome, std::string text);
  bool finish_buckets();
  void end_group_unless_agreed() noexcept;
  void take_results();
  void write_back();
  void write_back(std::size_t index);
  void close(Ending outcome);
  void remake_hook_group() noexcept;

  // --- the beginning of a round, its names and troubles: reducer_round.cpp ---
  void begin();
  // As options_.reduce says.
  void weigh_norms();
  void share_samples();
  void check_norms(const std::vector<double>& changes);
  // Before the first hook of a round all ranks meet in the reducer's own group: one that does not
  // come to this round is found out there, and not missed inside of the hook. True: they have met.
  bool have_met();
  void meet_before_hooks();
  void trouble(Ending outcome, std::string text);
  void end_hook_group();
  void announce();
  [[noreturn]] static void refuse_hook_in_join();
  Bucket& bucket_of(const ParameterState& parameter) { return layout_.buckets[parameter.bucket]; }
  std::string where(std::size_t bucket) const;
  std::string head() const;
  Purpose purpose() const;

  // --- ranks that do not do the same: reducer_recover.cpp ---
  void note_unwound();
  void take_part_late(const coll::Disagreement& disagreement);
  Error late_round(Ending outcome, const std::string& text);
  bool can_go_on(const coll::Disagreement& disagreement) const;
  // An operation of a round on the group. False: it was the round's first one, and ranks called
  // different things; they all go on with the next one.
  template <class Function>
  bool issue(Function operation) {
    return round_.issue(operation, [this](const auto& e) { return absorb(e); });
  }
  template <class Function>
  bool go_on_if(bool first, Function operation) {
    return Round::go_on_if(first, operation, [this](const auto& e) { return absorb(e); });
  }
  bool absorb(const coll::Disagreement& disagreement);

  // --- looking at rounds: reducer_checks.cpp ---
  void check_finite(std::size_t bucket);
  void check_finite_alone();
  void check_replicas();
  void skip_round(const std::string& reason);
  std::vector<Stamps> stamps_of_all(Ending outcome) const;

  // --- distributed backward passes: reducer_context.cpp ---
  at::Tensor out_of_bucket(std::size_t index) const;

  // --- sparse gradients: reducer_sparse.cpp ---
  void check_sparse();
  void reduce_sparse();
  at::Tensor reduce_rows(std::size_t index, const at::Tensor& mine);

  // --- which parameters, in which buckets: reducer_layout.cpp ---
  void look_at_parameters();
  void agree_on_order();
  std::vector<std::vector<std::size_t>> plan(bool delayed) const;
  void lay_out();
  void add_buckets();
  at::ScalarType travels_as(std::size_t index) const;
  void consume();
  void share_buckets();
  ShardPort* port_of(const Bucket& bucket) const;
  bool defers(const Bucket& bucket) const;
  void place(Bucket&& bucket);
  void move_gradients(Bucket& bucket);
  std::uint64_t layout_hash() const;

  const HomeProcess home_;
  std::vector<at::Tensor> tensors_;
  ProcessGroup group_;
  ReducerSetup options_;
  const int size_;
  std::vector<ParameterState> parameters_;
  std::vector<NodePtr> accumulators_;
  Layout layout_;
  Verdict verdict_;
  const std::shared_ptr<NormWeight> norm_weight_;
  std::uint64_t serial_ = 0;              // the same on all ranks, another for each reducer
  std::unique_ptr<SharedBirths> births_;  // none: gradients are not born in shared memory
  Users users_;
  Forwards forwards_;
  Round round_;
  JoinDriver join_;
  RoundObserver observer_;

  // Of distributed backward passes.
  struct Loan {
    Loan();
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;
    ~Loan();

    std::optional<ContextGradients> own = {};  // while `.grad` is a context's
    GradientHome* pass = nullptr;              // that this backward is part of
  };
  Loan loan_;

  int paused_ = 0;
  bool in_backward_ = false;
  bool syncing_ = false;        // this backward
  bool learnt_ = false;         // static graph: after the first round
  bool alone_ = false;          // nobody to reduce with, and no hook
  bool launches_late_ = false;  // buckets go at the end of backward
  const bool compares_;         // ranks that call different things are told, and nothing else
};

// Reaches what a Reducer is made of.
struct ReducerAccess {
  static const std::shared_ptr<Reducer::Impl>& impl(const Reducer& reducer) {
    return reducer.impl_;
  }
  static std::unique_ptr<Reducer> make(std::vector<at::Tensor> parameters, ProcessGroup group,
                                       ReducerSetup options) {
    return std::unique_ptr<Reducer>(new Reducer(std::make_shared<Reducer::Impl>(
        std::move(parameters), std::move(group), std::move(options))));
  }
};

}  // namespace convoy
