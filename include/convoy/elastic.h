#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "convoy/group.h"
#include "convoy/store.h"

// Elastic training: it continues when ranks die, and takes in new ranks.
//
//   convoy::elastic::run(model, {.store = store, .joins = is_replacement},
//                        [&](std::uint64_t step) {
//     loss(model(batch(step, model.group().rank(), model.group().size()))).backward();
//     optimizer.step();
//     return step + 1 < kSteps;
//   });
//
// See docs/reference/elastic.md.
namespace convoy::elastic {

// A change of members, as all members see it.
struct Change {
  ProcessGroup group;
  std::uint64_t step = 0;  // the next step
};

struct Options {
  // The store of all members, also of future ones. It must not live in a process that may die: see
  // StoreHost.
  std::shared_ptr<Store> store = nullptr;
  // This process is a newcomer: it waits until the members take it in. Its model must be in a group
  // of size 1.
  bool joins = false;
  // If there are fewer members, they wait until others join.
  int min_size = 1;
  // Members check for newcomers after this many steps, and after each death. 0: only after deaths.
  std::uint64_t look_every = 1;
  // Limit for one change of members, including the wait for min_size, and for the wait of a
  // newcomer.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  // Called on every member after each change.
  std::function<void(const Change&)> on_change = {};
};

// Anything with a group that can be replaced, such as DistributedDataParallel and Reducer.
struct Model {
  std::function<ProcessGroup()> group;
  std::function<void(const ProcessGroup&)> update;  // update_process_group()
};

// Calls step(0), step(1), ... until it returns false. Returns the number of the step that would
// follow; 0 if this process asked to join after the end. Blocks for the whole training. All members
// make the same steps.
//
// If a member dies, `step` throws kPeerLost on the others: they continue without it and repeat that
// step. If no member has died, a step is repeated at most 3 times; then the error is rethrown.
// Newcomers begin at the current step of the members, with their model, and with the state and
// learning rates of an attached ShardedOptimizer. Other optimizers are not synchronized.
//
// Throws kTimeout if too few members are left, or if the members do not take this process in.
// Throws kInvalidArgument without a store, if the timeout is not positive, or if a newcomer's group
// has more than one rank. Other exceptions of `step` are passed on. Needs backend "convoy".
std::uint64_t run(const Model& model, const Options& options,
                  const std::function<bool(std::uint64_t step)>& step);

template <class Wrapped>
  requires requires(Wrapped& model) { model.update_process_group(model.group()); }
std::uint64_t run(Wrapped& model, const Options& options,
                  const std::function<bool(std::uint64_t step)>& step) {
  return run(
      Model{.group = [&model] { return model.group(); },
            .update = [&model](const ProcessGroup& group) { model.update_process_group(group); }},
      options, step);
}

// A store server for the members, in a process that outlives them, such as the one that starts
// them. Members connect with connect_store(path, deadline).
class StoreHost {
 public:
  StoreHost();
  ~StoreHost();
  StoreHost(const StoreHost&) = delete;
  StoreHost& operator=(const StoreHost&) = delete;

  // Path of the socket, in a folder that only this user can open. The destructor removes both.
  const std::string& path() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace convoy::elastic
