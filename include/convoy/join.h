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
  bool enable = true;  // false: the Join does nothing
  // true: gradients are divided by the size of the group, also when some ranks have no more inputs.
  // false: by the number of ranks that have inputs. (No effect on GradReduce::kSum and weighted().)
  bool divide_by_initial_world_size = true;
  // When the first rank has no more inputs, all ranks throw at their next step.
  bool throw_on_early_termination = false;
};

// A step of the ranks that still have inputs. All ranks have the same value.
struct JoinStep {
  std::vector<int> live = {};  // ranks that have inputs, ascending; never empty
};

// The end of a Join: no rank has inputs any more.
struct JoinEnd {
  bool is_last_joiner = false;  // this rank took part in the last step with inputs
  int last_joiner = 0;          // the highest such rank; the same on all ranks
};

// What a Joinable does on a rank that has no more inputs.
class JoinHook {
 public:
  virtual ~JoinHook() = default;
  // Called once, when this rank runs out of inputs.
  virtual void pre_hook() {}
  // Called for each step of the other ranks. Must call the same collectives, without adding
  // anything.
  virtual void main_hook(const JoinStep& /*step*/) {}
  // Called on every rank, when no rank has inputs any more. Collective.
  virtual void post_hook(const JoinEnd& /*end*/) {}
};

class JoinContext;  // opaque

// A participant of a Join: DistributedDataParallel, Reducer, or a class of your own that
// communicates once per step:
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
// In this example, main_hook() of the hook all-reduces zeros. A Joinable must not move while it is
// in a Join. Not thread-safe.
class Joinable {
 public:
  Joinable() = default;
  Joinable(const Joinable&) noexcept {}  // a copy is not in a Join
  // NOLINTNEXTLINE(bugprone-unhandled-self-assignment): nothing is assigned
  Joinable& operator=(const Joinable&) noexcept { return *this; }
  virtual ~Joinable() = default;

  // Called on all ranks when a Join begins. The hook is destroyed when the Join ends.
  virtual std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) = 0;
  virtual const ProcessGroup& join_process_group() const = 0;

 protected:
  // Call this before the collectives of a step, on a rank that has an input. Returns nullopt
  // outside of a Join. Collective: the first Joinable of a Join sends one small message to all
  // ranks; for the other Joinables it only returns the same step. Throws kInvalidArgument if ranks
  // are not in the same step, kRemote if a rank has left its loop by an exception.
  std::optional<JoinStep> notify_join_context();

 private:
  friend class JoinContext;
  std::weak_ptr<JoinContext> join_;
};

// Runs a loop on ranks that have different numbers of inputs. A rank without inputs takes part in
// the steps of the others, without adding anything, until no rank has inputs. Then all ranks get
// the model of a rank that was in the last step.
//
//   convoy::join({&model}, [&] {
//     for (auto& batch : *loader) {
//       sgd.zero_grad();
//       loss(model(batch.data), batch.target).backward();
//       sgd.step();
//     }
//   });
//
// If there are several joinables, list each once, in the order in which a step uses them. All must
// use one group. The loop must not call other collectives of that group. If the loop throws on one
// rank, all other ranks throw kRemote. Optimizer state is not synchronized: it is that of the steps
// with this rank's inputs. See docs/reference/ddp.md.
template <class Loop>
void join(std::vector<Joinable*> joinables, Loop&& loop, const JoinOptions& options = {});

// The same as an object: construct it, run the loop, call finish(). Not thread-safe.
class [[nodiscard]] Join {
 public:
  // Collective, blocks. Throws kInvalidArgument on all ranks if they pass different things, if
  // joinables use several groups, or if one is in another Join.
  explicit Join(std::vector<Joinable*> joinables, const JoinOptions& options = {});
  // Without finish() or abandon() it aborts the group, so that no rank waits for this one.
  ~Join();
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  // Call it when this rank has no more inputs. Blocks until no rank has any; the timeout of the
  // group applies to each step. Throws kRemote if the loop of another rank has thrown. With
  // throw_on_early_termination, throws kInvalidArgument if other ranks have inputs left.
  void finish();
  // Call it instead of finish() after an exception: the other ranks throw this text.
  void abandon(const std::string& why) noexcept;

 private:
  std::shared_ptr<JoinContext> context_;  // joinables have weak pointers to it
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
