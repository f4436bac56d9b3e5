// A forked child has its parent's tensors, and nobody knows but the two. Until the child has set
// its bits, the blocks count as being under way.
#include <pthread.h>

#include "base/error.h"
#include "base/log.h"
#include "os/fork_guard.h"
#include "share/depot_state.h"

namespace convoy::share {
namespace {

using Blocks = std::set<std::pair<Segment::Key, std::uint64_t>>;

// Written in a child before it has another thread.
Blocks& inherited_blocks() {
  static auto* const blocks = new Blocks;
  return *blocks;
}

void for_each_held(auto& holdings, auto visit) {
  for (const auto& [entry, holding] : holdings) {
    if (holding->count > 0) visit(*holding);
  }
}

}  // namespace

void Depot::Fork::install() {
  static const int error = pthread_atfork(before, in_parent, in_child);
  CONVOY_CHECK(error == 0, errno_text(error));
}

bool Depot::Fork::inherited(const Segment::Key& key, std::uint64_t entry) {
  return inherited_blocks().contains({key, entry});
}

// Of the fork under way in this thread.
std::optional<Depot::Fork::Lock>& Depot::Fork::lock() {
  static thread_local std::optional<Lock> held;
  return held;
}

void Depot::Fork::before() {
  Depot* const depot = existing();
  if (!depot) return;
  auto& held = lock();
  held.emplace(depot->state_->lock());
  for_each_held((*held)->holdings, [](const Holding& holding) {
    holding.ref.book->book().enter_transit(holding.ref.entry);
  });
}

void Depot::Fork::in_parent() { lock().reset(); }

void Depot::Fork::in_child() {
  auto& held = lock();
  if (!held) return;
  try {
    std::unordered_map<const Region*, int> slots;
    const ProcessWord self = own_process_word();
    for_each_held((*held)->holdings, [&](const Holding& holding) {
      const Region& region = *holding.ref.book;
      // A named block is a file of its own: the child's mapping is all it needs.
      if (region.kind() != Region::Kind::kNamed) {
        auto slot = slots.find(&region);
        if (slot == slots.end()) {
          const std::uint64_t domain = region.book().head().domain;
          const int claimed = region.book().claim_slot(
              self, [domain](ProcessWord word) { return is_dead(word, domain); });
          slot = slots.emplace(&region, claimed).first;
        }
        region.book().acquire(holding.ref.entry, holding.ref.generation, slot->second);
        inherited_blocks().emplace(region.key(), holding.ref.entry);
      }
      region.book().leave_transit(holding.ref.entry);
    });
  } catch (const std::exception& error) {
    // What is left counts as under way for good: safe, but never free again.
    log_warn("a forked child could not say what it inherited: ", error.what());
  }
  held.reset();
}

}  // namespace convoy::share
