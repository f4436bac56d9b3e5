#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "convoy/group.h"

namespace convoy {

struct JoinOptions {
  bool enable = true;  // false: a Join does nothing
  // Gradients are divided by the group's size, also when ranks have no more inputs; false: by the
  // number of those that have. (GradReduce::kSum and weighted() do not depend on it.)
  bool divide_by_initial_world_size = true;
  // When the first rank has no more inputs, all ranks throw at their next step instead of going on.
  bool throw_on_early_termination = false;
};

// One step of the ranks that still have inputs, as all ranks know it.
struct JoinStep {
  std::vector<int> live = {};  // ranks that have inputs, ascending; at least one
};

// When no rank has inputs any more.
struct JoinEnd {
  bool is_last_joiner = false;  // this rank was in the last step
  int last_joiner = 0;          // the greatest rank that was: the same on all ranks
};

// What a Joinable does for a rank that has no more inputs.
class JoinHook {
 public:
  virtual ~JoinHook() = default;
  // Once, when this rank has come to its end.
  virtual void pre_hook() {}
  // For each step of the others: the collectives that they do, with nothing to add.
  virtual void main_hook(const JoinStep& /*step*/) {}
  // On every rank, when none has inputs any more. Collective.
  virtual void post_hook(const JoinEnd& /*end*/) {}
};

class JoinContext;  // opaque

// What takes part in a Join: DistributedDataParallel, Reducer, and classes of your own that
// communicate once a step:
//
//   class Counter : public convoy::Joinable {
//    public:
//     void step() {
//       notify_join_context();                    // first, when this rank has an input
//       group_.all_reduce(ones);
//     }
//     std::unique_ptr<convoy::JoinHook> join_hook(const convoy::JoinOptions&) override;
//     const convoy::ProcessGroup& join_process_group() const override { return group_; }
//   };
//
// whose hook's main_hook all-reduces zeros. It stays where it is while it is part of a Join.
class Joinable {
 public:
  Joinable() = default;
  Joinable(const Joinable&) noexcept {}  // a copy is in no Join
  // NOLINTNEXTLINE(bugprone-unhandled-self-assignment): nothing is assigned
  Joinable& operator=(const Joinable&) noexcept { return *this; }
  virtual ~Joinable() = default;

  // Called when a Join begins, on all ranks; the hook goes when it ends.
  virtual std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) = 0;
  virtual const ProcessGroup& join_process_group() const = 0;

 protected:
  // To be called before the collectives of a step by a rank that has an input; nullopt outside of a
  // Join. The first of a Join's joinables sends one small message to all ranks; for the others it
  // is the same step. Throws if ranks are not in the same step, or if one has left by an exception.
  std::optional<JoinStep> notify_join_context();

 private:
  friend class JoinContext;
  std::weak_ptr<JoinContext> join_;
};

// Ranks that have different numbers of inputs: one that has come to its end takes part in the steps
// of the others until all have, without adding anything, and then gets the model of a rank that was
// in the last step.
//
//   convoy::join({&model}, [&] {
//     for (auto& batch : *loader) {
//       sgd.zero_grad();
//       loss(model(batch.data), batch.target).backward();
//       sgd.step();
//     }
//   });
//
// Several joinables stand in the order in which a step uses them, each once, over one group. Other
// collectives of that group have no place in the loop. An exception of one rank's loop is an error
// on all ranks. Optimizer state stays that of each rank's own steps. See docs/reference/ddp.md.
template <class Loop>
void join(std::vector<Joinable*> joinables, Loop&& loop, const JoinOptions& options = {});

// The same as a scope of its own: make it, run the loop, call finish(). Not thread-safe.
class [[nodiscard]] Join {
 public:
  // Collective. kInvalidArgument on all ranks if they differ in what they pass; for joinables of
  // several groups, or that are in another Join.
  explicit Join(std::vector<Joinable*> joinables, const JoinOptions& options = {});
  // Without finish() or abandon() it aborts the group, so that nobody waits for this rank.
  ~Join();
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  // This rank has no more inputs. Blocks until no rank has; the time-out of the group is for each
  // step. kRemote if another rank's loop has thrown; with throw_on_early_termination
  // kInvalidArgument if others have inputs left.
  void finish();
  // Instead of finish(): the others throw this text, with this rank's number.
  void abandon(const std::string& why) noexcept;

 private:
  std::shared_ptr<JoinContext> context_;  // joinables look for it
};

template <class Loop>
void join(std::vector<Joinable*> joinables, Loop&& loop, const JoinOptions& options) {
  Join scope(std::move(joinables), options);
  try {
    std::forward<Loop>(loop)();
  } catch (const std::exception& error) {
    scope.abandon(error.what());
    throw;
  } catch (...) {
    scope.abandon("something was thrown");
    throw;
  }
  scope.finish();
}

}  // namespace convoy
