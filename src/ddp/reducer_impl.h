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
#include "ddp/checks.h"
#include "ddp/graph.h"
#include "ddp/norm_weight.h"
#include "ddp/shard_port.h"
#include "ddp/timeline.h"
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
  Impl(std::vector<at::Tensor> parameters, ProcessGroup group, ReducerOptions options);

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
    begins_ = std::move(begins);
    ends_ = std::move(ends);
    replicas_ = std::move(replicas);
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
  bool is_busy() const { return open_ || in_backward_; }
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
  void follow(const std::shared_ptr<Impl>& other) { followers_.push_back(other); }
  Timeline& timeline() { return timeline_; }
  DdpStats logging_data() const;
  std::vector<std::string> bucket_names() const;
  bool skipped() const { return skipped_; }

  // What a Join adds to rounds: reducer_join.cpp.
  struct JoinPort {
    std::function<JoinStep()> announce;           // tells the ranks without inputs
    std::function<void(const JoinStep&)> finish;  // after a good round, on all ranks
    std::function<bool()> defers;  // others announce during backward: rounds begin at its end
    bool divides_by_live = false;
    bool is_part = false;  // of a Join that somebody else conducts
  };
  void set_join(std::unique_ptr<JoinPort> port);
  // A round to which this rank adds nothing but what it has not reduced yet.
  void shadow_round(const JoinStep& step);
  bool is_in_part() const { return join_ && join_->is_part; }
  bool is_paused() const { return paused_ > 0; }

  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  const ProcessGroup& group() const { return group_; }
  const ReducerOptions& options() const { return options_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  const std::shared_ptr<NormWeight>& norm_weight() const { return norm_weight_; }
  const std::vector<bool>& used() const { return verdict_.used(); }
  const ReducerStats& stats() const { return stats_; }

 private:
  const HomeProcess home_;
  using Clock = std::chrono::steady_clock;

  static constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

  struct Parameter {
    std::string name;
    at::ScalarType type = at::kFloat;  // of the parameter itself, whatever it computes with
    bool sparse = false, delayed = false;
    bool taken = false, dropped = false;  // by a consumer; and then `.grad` is undefined
    bool active = false;                  // required a gradient when last looked at
    NodePtr accumulator;                  // which the tensor itself does not keep alive
    std::uintptr_t hook = 0;
    std::size_t bucket = kNone, slot = 0;

    bool used = false;      // a gradient of this rank's was added since the last round
    bool computed = false;  // by a backward: not by the user
    bool reduced = false;   // the gradient is what the last round left
    bool mixed = false;     // it was, when a backward that we cannot tell apart added to it
    at::Tensor summed;      // taken out of the gradient, so that it is not summed again
    // The gradient when it was reduced, or, while `summed` is there, after the last addition:
    // another tensor, or another version, is the user's doing. It is held, so that no other tensor
    // comes to lie where it was.
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> seen{
        at::Tensor().getIntrusivePtr()};
    std::int64_t seen_version = 0;
    int expected = 1;         // how often its hook ran in the last round
    bool left_local = false;  // this rank's own, though its bucket is not deferred any more
    bool learnt_unused = false;
    bool hidden = false;  // came although no output had reached it: behind a nested backward

    // In a round:
    bool touched = false;  // the user has changed the reduced gradient in place
    int fired = 0;
    std::size_t arrival = 0;  // place among all gradients that came
    bool ready = false;       // in its slot
    bool presumed_unused = false;
    at::Tensor kept;     // what the gradient was, if this rank has nothing to add
    at::Tensor graph;    // the gradient with its history, under create_graph
    at::Tensor rows;     // sparse metadata: of all ranks' gradients, sorted
    bool stays = false;  // is reduced where it was made: its slot is not used

    bool is_seen(const at::Tensor& gradient) const {
      return gradient.defined() && seen._unsafe_get_target() == gradient.unsafeGetTensorImpl();
    }
    bool is_untouched(const at::Tensor& gradient) const {
      return is_seen(gradient) && gradient._version() == seen_version;
    }
    void note(const at::Tensor& gradient) {
      seen = gradient.getIntrusivePtr();
      seen_version = gradient._version();
    }
  };

  // --- what it is made of: reducer_make.cpp ---
  void check();
  std::vector<std::string> description() const;

  // --- a backward: reducer.cpp ---
  void take_off(Parameter& parameter);
  c10::intrusive_ptr<Sink> make_sink(std::uint64_t forward, std::shared_ptr<ForwardFate> fate);
  bool enter(Sink* sink);
  bool sums_once() const;
  void set_sums_aside();
  void look_for_mixing(std::size_t index);
  void on_gradient(std::size_t index, bool defined);
  void leave();
  void end();
  void failed(const std::string& cause);
  std::vector<NodePtr> waiting_sinks(const std::set<std::uint64_t>* of_forwards = nullptr);
  bool comes_by_a_sink();
  std::vector<std::size_t> missing() const;
  std::string names_of(const std::vector<std::size_t>& indices) const;
  std::string missing_text(const std::vector<std::size_t>& indices) const;

  // --- a round: reducer_round.cpp, and its end: reducer_end.cpp ---
  void open(const Sink* sink);
  void begin();
  // As options_.reduce says.
  void weigh_norms();
  void share_samples();
  void check_norms(const std::vector<double>& changes);
  void presume_unused(const Sink* sink);
  void make_ready(std::size_t index);
  void copy_in(std::size_t index);
  void settle(std::size_t index);
  void launch_complete_ones();
  void launch(std::size_t bucket);
  // Before the first hook of a round all ranks meet in the reducer's own group: one that does not
  // come to this round is found out there, and not missed inside of the hook. True: they have met.
  bool have_met();
  void meet_before_hooks();
  HookResult start(std::size_t bucket);
  // To the end, whatever it is; throws unless all ranks are fine.
  void complete(Ending outcome, std::string text);
  bool finish_buckets();
  void end_group_unless_agreed() noexcept;
  void take_results();
  void write_back();
  void write_back(std::size_t index);
  void close(Ending outcome);
  void trouble(Ending outcome, std::string text);
  template <class Function>
  void guarded(std::size_t bucket, Function function);
  void end_hook_group();
  void remake_hook_group() noexcept;
  void announce();
  void add_nothing(std::size_t index);
  double join_scale() const;
  [[noreturn]] static void refuse_hook_in_join();
  Bucket& bucket_of(const Parameter& parameter) { return buckets_[parameter.bucket]; }
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
    if (std::exchange(late_, false)) return false;
    return go_on_if(std::exchange(first_, false), operation);
  }
  template <class Function>
  bool go_on_if(bool first, Function operation) {
    try {
      operation();
    } catch (const coll::Disagreement& e) {
      if (!first || !can_go_on(e)) throw;
      trouble(Ending::kDisturbed, e.what());
      return false;
    }
    return true;
  }

  // --- gradients that stay where they are: reducer_pieces.cpp ---
  void enter_births();
  bool can_stay(std::size_t index) const;
  void move_shared_ones(const Bucket& bucket);
  std::vector<at::Tensor> pieces_of(const Bucket& bucket) const;
  bool travels_in_pieces() const;

  // --- looking at rounds: reducer_checks.cpp ---
  void check_finite(std::size_t bucket);
  void check_finite_alone();
  void check_replicas();
  void skip_round(const std::string& reason);
  void observe(Ending outcome, Clock::time_point now);
  std::vector<Stamps> stamps_of_all(Ending outcome) const;

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

  std::vector<at::Tensor> tensors_;
  ProcessGroup group_;
  ReducerOptions options_;
  std::vector<std::int64_t> caps_;
  const int size_;
  std::vector<Parameter> parameters_;
  std::vector<NodePtr> accumulators_;
  std::vector<Bucket> buckets_;
  std::vector<std::size_t> order_;  // all parameters as they arrive; empty before the first round
  Verdict verdict_;
  const std::shared_ptr<NormWeight> norm_weight_;
  std::uint64_t serial_ = 0;  // the same on all ranks, another for each reducer
  CommHook hook_;
  std::vector<GradConsumer> consumers_;
  std::vector<std::shared_ptr<ShardPort>> ports_;
  std::function<void()> begins_;
  std::function<void(BackwardEnd)> ends_;
  Replicas replicas_;
  std::unique_ptr<SharedBirths> births_;  // none: gradients are not born in shared memory
  ProcessGroup hook_group_;               // none: to be made by the next round
  std::optional<Work> meeting_;           // before hooks, under way
  std::vector<c10::weak_intrusive_ptr<Sink>> sinks_;

  int paused_ = 0;
  bool in_backward_ = false;
  bool syncing_ = false;   // this backward
  bool open_ = false;      // a round
  bool begun_ = false;     // its first step is done
  bool changed_ = false;   // parameters were frozen or thawed since buckets were made
  bool learnt_ = false;    // static graph: after the first round
  bool armed_ = false;     // a gradient with a history was computed: its backward passes no sink
  bool guessed_ = false;   // the layout, because rank 0 had seen no gradients
  bool alone_ = false;     // nobody to reduce with, and no hook
  bool late_now_ = false;  // in this round
  bool launches_late_ = false;  // buckets go at the end of backward
  std::size_t next_ = 0;        // bucket to launch
  std::size_t arrivals_ = 0;
  std::uint64_t last_forward_ = 0;  // numbers of forwards: 1, 2, ...
  // In step, since the last round; not those that stay local.
  std::map<std::uint64_t, std::shared_ptr<ForwardFate>> forwards_;
  std::set<std::uint64_t> visited_;  // by backwards of this round
  double weight_ = 1;
  Timeline timeline_;
  DebugLevel debug_ = DebugLevel::kOff;
  std::vector<std::weak_ptr<Impl>> followers_;  // are paused with this one
  bool skipped_ = false;                        // the last round
  bool can_be_static_ = true;
  std::vector<bool> last_used_;
  std::int64_t unused_bytes_ = 0;  // of the last round
  std::string error_;              // of the last round
  std::unique_ptr<JoinPort> join_;
  JoinStep join_step_;      // of this round
  bool announced_ = false;  // this round
  bool shadowing_ = false;
  std::string owed_;        // why this rank does not come to a backward of the others
  const char* round_ = "";  // what began this round
  bool first_ = false;      // no operation of this round was issued yet
  // The first one is under way: the message of a deferred bucket, or `meeting_`.
  bool first_in_port_ = false, first_is_meeting_ = false;
  bool met_ = false;            // before hooks
  bool late_ = false;           // this rank's first one was another: the round's is over
  bool in_late_round_ = false;  // which this rank did not begin
  const bool compares_;         // ranks that call different things are told, and nothing else
  Ending outcome_ = Ending::kGood;
  std::string text_;
  ReducerStats stats_;
  Clock::time_point entered_, last_gradient_;
};

// Reaches what a Reducer is made of.
struct ReducerAccess {
  static const std::shared_ptr<Reducer::Impl>& impl(const Reducer& reducer) {
    return reducer.impl_;
  }
};

}  // namespace convoy
