#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include "convoy/sharded_optimizer.h"
#include "ddp/peer_memory.h"
#include "ddp/reducer_impl.h"
#include "ddp/shard_port.h"
#include "optim/shard_layout.h"
#include "os/fork_guard.h"
#include "transport/shm/arena.h"

namespace convoy {

inline constexpr const char* kShardedName = "ShardedOptimizer";

template <class... Text>
[[noreturn]] void refuse_sharded(const Text&... text) {
  fail(ErrorKind::kInvalidArgument, kShardedName, ": ", text...);
}

// Words: a *member* is a parameter that it updates. *Numbers* are real ones, of which complex ones
// have two. Blocks and chunks: see ShardLayout.
//
// A step, on all ranks:
//   meet       ranks compare options and which members have a gradient; nobody changes a gradient
//              or uses a parameter from here on
//   norm       if it is needed: each rank of its blocks, then of all
//   update     each rank its blocks: own state and parameters first, then the others' parameters
//   part       a barrier (where memory is not shared: all ranks gather the results)
// Where a backward is overlapped, `meet` is one small operation for each bucket, and `part` is the
// verdict of the round.
class ShardedOptimizerBase::Impl final : public ShardPort,
                                         public std::enable_shared_from_this<Impl> {
 public:
  Impl(ShardedOptimizerBase& owner, Reducer& reducer, const ShardedOptimizerOptions& options);
  ~Impl() override;
  void attach(const std::shared_ptr<Reducer::Impl>& reducer);
  void detach() noexcept;

  // kUnsupported in a forked child: parameters and state are in memory that is the rank's, too.
  void check_process(const char* operation) const;
  // Collective. With an error this rank only tells the others, and throws it.
  void step(const std::string& error = {});
  States states() const;
  void load_states(const States& states);
  Stats stats() const;
  void set_steps(std::uint64_t steps) { stats_.steps = steps; }
  const ProcessGroup& group() const { return group_; }

  const std::vector<bool>& takes() const override { return takes_; }
  bool is_in_backward() const override { return options_.in_backward; }
  bool overlaps() const override { return overlaps_; }
  bool reads_in_place() const override { return shares_ && !options_.in_backward; }
  void launched(std::size_t bucket, bool good, const std::vector<bool>& used) override;
  void drain() override;
  void finish(const std::vector<bool>& used) override;
  void closed() noexcept override;
  std::vector<std::string> description() const override;
  void leave_group() override;
  void enter_group(const std::shared_ptr<Reducer::Impl>& reducer, int root) override;

 private:
  struct ShardedParameter {
    std::size_t index;  // in the reducer
    std::size_t group;
    at::Tensor parameter;
    at::ScalarType type;
    std::int64_t numbers;
    std::size_t number_bytes;
    std::size_t offset = 0;  // of its numbers in memory_
    at::Tensor home = {};    // its data, there
    std::int64_t steps = 0;
    bool begun = false;  // its state 0 was used
  };
  // Where a member's gradients are in a step.
  struct Gradient {
    std::size_t member;
    std::vector<const std::byte*> sources;  // of all ranks, or one: what is reduced already
    bool deferred;
    at::Tensor kept;  // what `sources` points into, if nobody else keeps it
  };
  struct Task {
    const Gradient* gradient;
    std::size_t block;  // of the layout
  };

  static constexpr std::size_t kMostRanks = 64;  // that share memory

  // --- sharded_optimizer.cpp ---
  void find_members(Reducer& reducer);
  std::vector<std::string> describe_with(const std::vector<OptimizerRule>& rules) const;
  void check_apart(const Reducer::Impl& reducer) const;
  std::vector<OptimizerRule> rules() const;
  std::uint64_t options_hash() const;
  std::vector<ShardLayout::Item> items(const std::vector<OptimizerRule>& rules) const;
  std::string name_of(const ShardedParameter& member) const;

  // --- shard_step.cpp ---
  using Places = std::vector<shm::Location>;  // by member; none: in its bucket
  struct Own {                                // what a rank brings to a step
    std::vector<bool> has;
    Places places = {};  // empty: all in their buckets
    std::string error = {};
    bool unreduced = false;  // there are gradients that must be reduced first
  };
  // nullopt: some rank has gradients that must be reduced first.
  std::optional<std::vector<Places>> meet(Own own);
  Own look_at_gradients(const Reducer::Impl& reducer) const;
  void take_rules();
  std::vector<Gradient> gradients(const std::vector<bool>& has,
                                  const std::vector<Places>& places = {});
  void run(const std::vector<bool>& has, const std::vector<Places>& places);
  const std::byte* find(int rank, const shm::Location& location, std::size_t bytes) const;
  void part(const std::vector<bool>& has);
  enum class Idle { kYes, kNo };
  Idle wait_until_idle();

  // --- shard_update.cpp ---
  std::vector<Task> tasks(const std::vector<Gradient>& gradients) const;
  double norm(const std::vector<Gradient>& gradients);
  void reduce_in_place(std::vector<Gradient>& gradients);
  enum class Threads { kOne, kAll };
  void update(const std::vector<Gradient>& gradients, double scale, Threads threads);
  void update_block(const Task& task, double scale, std::size_t journal);
  template <class T>
  void update_chunk(const Task& task, std::int64_t begin, double scale, std::size_t journal);
  template <class T>
  void add_up(const Gradient& gradient, std::int64_t begin, std::int64_t end, T* target) const;
  void count(const std::vector<Gradient>& gradients);
  void work(const std::stop_token& stop);
  struct Launched;
  void prepare(std::size_t bucket, Launched& item);
  void update_launched(Launched& item);
  void gather_results(const std::vector<bool>& has);

  // --- shard_state.cpp ---
  PeerMemory::Kind memory_kind() const {
    return shares_ ? PeerMemory::Kind::kShared : PeerMemory::Kind::kOwn;
  }
  void move_in();
  void hold(ShardedParameter& member);
  void move_shards(const std::shared_ptr<Reducer::Impl>& reducer, int root);
  bool must_grow() const;
  void make_state(const std::vector<ShardLayout::Item>& items);
  void put_state(std::size_t member, std::size_t state, const at::Tensor& whole);
  at::Tensor whole_state(std::size_t member, std::size_t state) const;
  void fill_initial(const ShardedParameter& member, std::byte* to, std::size_t numbers) const;
  bool is_kept(std::size_t member, std::size_t state) const;
  std::uint64_t* word(int rank, std::size_t index) const;  // a CommitWord

  const HomeProcess home_;
  ShardedOptimizerBase* owner_;
  ShardedOptimizerOptions options_;
  std::weak_ptr<Reducer::Impl> reducer_;
  ProcessGroup group_;
  bool shares_ = false;
  bool overlaps_ = false;
  std::vector<ShardedParameter> members_;  // in the reducer's order
  std::vector<bool> takes_;
  PeerMemory memory_;  // of parameters
  ShardLayout layout_;
  PeerMemory state_;
  std::vector<OptimizerRule> rules_;  // of this step
  ReduceOp op_ = ReduceOp::kAvg;      // of this step
  Stats stats_;

  // --- a backward that is overlapped ---
  struct Launched {
    std::size_t bucket;
    Work work;
    at::Tensor mine, all;
    std::vector<Gradient> gradients;  // of all its members
    std::vector<std::size_t> places;  // of these in the bucket
  };
  struct Round {
    bool begun = false;      // rules_ are those of this round
    std::vector<bool> done;  // members
    bool some_done = false;
  };
  Round round_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<Launched> queue_;  // guarded by mutex_
  bool busy_ = false;           // guarded by mutex_
  std::exception_ptr trouble_;  // guarded by mutex_: of this round
  bool stuck_ = false;          // the thread has not come back in time: there are no more steps
  // Of a step that failed: other ranks may still read them.
  std::vector<at::Tensor> left_behind_;
  // Last, so that it ends first.
  std::jthread thread_;
};

}  // namespace convoy
