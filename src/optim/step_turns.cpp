#include "optim/step_turns.h"

#include <set>
#include <unordered_map>
#include <utility>

#include "base/guarded.h"

namespace convoy {

struct StepTurns::Circle {
  std::mutex mutex;
  std::shared_ptr<Circle> joined;  // guarded by mutex; nullptr: this is where turns are taken
};

namespace {

using CirclePtr = std::shared_ptr<StepTurns::Circle>;

struct SteppedMemory {
  CirclePtr circle;
  std::size_t optimizers = 0;
};
using MemoryTable = std::unordered_map<const void*, SteppedMemory>;

Guarded<MemoryTable>& memory_table() {
  static auto* const table = new Guarded<MemoryTable>();  // optimizers may outlive main()
  return *table;
}

std::pair<CirclePtr, std::unique_lock<std::mutex>> lock_circle(CirclePtr circle) {
  for (;;) {
    std::unique_lock lock(circle->mutex);
    if (!circle->joined) return {std::move(circle), std::move(lock)};
    CirclePtr next = circle->joined;
    lock.unlock();
    circle = std::move(next);
  }
}

void join_circles(CirclePtr a, CirclePtr b) {
  while (a != b) {
    {
      const std::scoped_lock both(a->mutex, b->mutex);
      if (!a->joined && !b->joined) {
        a->joined = std::move(b);
        return;
      }
    }
    // Somebody else was quicker.
    a = lock_circle(std::move(a)).first;
    b = lock_circle(std::move(b)).first;
  }
}

}  // namespace

StepTurns::StepTurns(const std::vector<at::Tensor>& parameters) {
  std::set<const void*> storages;
  for (const at::Tensor& parameter : parameters) {
    storages.insert(parameter.storage().unsafeGetStorageImpl());
  }
  storages_.assign(storages.begin(), storages.end());
  std::set<CirclePtr> others;
  {
    auto table = memory_table().lock();
    for (const void* const storage : storages_) {
      SteppedMemory& memory = (*table)[storage];
      ++memory.optimizers;
      if (!memory.circle) {
        if (!circle_) circle_ = std::make_shared<Circle>();
        memory.circle = circle_;
      } else {
        others.insert(memory.circle);
      }
    }
  }
  if (!circle_) circle_ = others.empty() ? std::make_shared<Circle>() : *others.begin();
  for (const CirclePtr& other : others) join_circles(other, circle_);
}

StepTurns::~StepTurns() {
  std::vector<CirclePtr> gone;  // without the lock
  auto table = memory_table().lock();
  for (const void* const storage : storages_) {
    const auto found = table->find(storage);
    if (--found->second.optimizers != 0) continue;
    gone.push_back(std::move(found->second.circle));
    table->erase(found);
  }
  table.unlock();
}

std::unique_lock<std::mutex> StepTurns::take() const { return lock_circle(circle_).second; }

std::vector<std::unique_lock<std::mutex>> StepTurns::take_all(
    const std::vector<const StepTurns*>& sets) {
  for (;;) {
    std::set<CirclePtr> circles;  // in one order for all who take several
    for (const StepTurns* const each : sets) circles.insert(lock_circle(each->circle_).first);
    std::vector<std::unique_lock<std::mutex>> turns;
    bool joined = false;
    for (const CirclePtr& circle : circles) {
      turns.emplace_back(circle->mutex);
      joined |= circle->joined != nullptr;  // since it was looked for
    }
    if (!joined) return turns;
  }
}

}  // namespace convoy
