#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "convoy/group.h"
#include "convoy/store.h"

// Training that goes on when ranks die, and takes in new ones.
//
//   convoy::elastic::run(model, {.store = store, .joins = is_replacement}, [&](std::uint64_t step)
//   {
//     loss(model(batch(step, model.group().rank(), model.group().size()))).backward();
//     optimizer.step();
//     return step + 1 < kSteps;
//   });
//
// See docs/reference/elastic.md.
namespace convoy::elastic {

// After members have gone or come, on all of them.
struct Change {
  ProcessGroup group;
  std::uint64_t step = 0;  // the next one
};

struct Options {
  // Of all members, also those to come; it must not live in one that may die: see StoreHost.
  std::shared_ptr<Store> store = nullptr;
  // This process is not among the members yet: it waits until they take it in. Its model is in a
  // group of its own, of one.
  bool joins = false;
  // With fewer members, they wait for others to join.
  int min_size = 1;
  // Members look for others after every so many steps, and after each death; 0: only then.
  std::uint64_t look_every = 1;
  // Of one change of members, of waiting for min_size, and of waiting to be taken in.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  std::function<void(const Change&)> on_change = {};
};

// What has a group: DistributedDataParallel and Reducer do.
struct Model {
  std::function<ProcessGroup()> group;
  std::function<void(const ProcessGroup&)> update;  // update_process_group()
};

// Calls step(0), step(1), ... until it returns false; the number of the next step after that. All
// members make the same steps. When one has died, the others' step throws kPeerLost: they go on
// without it, and repeat that step. New members begin with the step that the others are at, with
// their model, states and learning rates. Returns 0 for a process that came to join after the end.
// Throws what `step` throws otherwise; kTimeout if too few members are left, and if nobody takes
// this process in. Needs backend "convoy".
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

// A store for members, in a process that outlives them: the one that starts them. They connect with
// connect_store(path, deadline).
class StoreHost {
 public:
  StoreHost();
  ~StoreHost();
  StoreHost(const StoreHost&) = delete;
  StoreHost& operator=(const StoreHost&) = delete;

  // Of a socket in a folder that only this user can open; both go with the object.
  const std::string& path() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace convoy::elastic
