#include "agent/functions.h"

#include <deque>
#include <map>
#include <tuple>

#include "base/error.h"
#include "base/guarded.h"
#include "os/fork_guard.h"

namespace convoy::agent {
namespace {

struct Declared {
  std::string name;
  std::string signature;
  std::uint64_t hash;
};

struct Declarations {
  std::deque<Declared> functions;  // stay where they are
  std::map<std::tuple<std::string, std::string, std::uint64_t>, FunctionId> ids;
};

// Never destroyed: functions are declared before main, and calls may end after it.
Guarded<Declarations>& declarations() {
  static auto* const all = new Guarded<Declarations>();
  return *all;
}

}  // namespace

FunctionId declare_function(const FunctionKey& key) {
  const ForkPause pause;  // a child must not find the lock held
  auto all = declarations().lock();
  const auto [found, added] =
      all->ids.try_emplace({std::string(key.name), std::string(key.signature), key.hash},
                           static_cast<FunctionId>(all->functions.size()));
  if (added) {
    all->functions.push_back({std::string(key.name), std::string(key.signature), key.hash});
  }
  return found->second;
}

FunctionKey declared_function(FunctionId id) {
  const ForkPause pause;
  auto all = declarations().lock();
  CONVOY_CHECK(id < all->functions.size(), "function ", id);
  const Declared& function = all->functions[id];
  return {function.name, function.signature, function.hash};
}

}  // namespace convoy::agent
