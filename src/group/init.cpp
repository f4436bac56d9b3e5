#include "convoy/init.h"

#include "base/concat.h"
#include "base/error.h"
#include "base/guarded.h"
#include "convoy/backend.h"
#include "convoy/rendezvous.h"
#include "group/registry.h"

namespace convoy {
namespace {

struct Default {
  InitOptions options;
  ProcessGroup group;
};

// Lives forever: leaving a group while statics are destroyed would meet what is gone already. The
// other ranks learn of the end of this process as of any.
Guarded<std::optional<Default>>& default_group() {
  static auto* const group = new Guarded<std::optional<Default>>;
  return *group;
}

bool same(const InitOptions& a, const InitOptions& b) {
  return a.backend == b.backend && a.method == b.method && a.rank == b.rank && a.size == b.size &&
         a.timeout == b.timeout && a.options == b.options;
}

ProcessGroup& scoped_group() {
  thread_local ProcessGroup group;
  return group;
}

struct Place {
  std::shared_ptr<Store> store;
  int rank;
  int size;
};

// Names without a name of their own are numbered in the store, by rank: every rank counts alike.
ProcessGroup make_group(const std::string& backend, const GroupConfig& config, const Place& place) {
  const auto factory = find_backend(backend, config.options);
  if (place.size < 1 || place.rank < 0 || place.rank >= place.size) {
    fail(ErrorKind::kInvalidArgument, "new_group: rank ", place.rank, " of ", place.size,
         " ranks makes no sense");
  }
  std::string name = config.name;
  if (name.empty()) {
    name = concat("group-", place.store->add(concat("convoy/groups/", place.rank), 1));
  }
  const auto keys = with_prefix(place.store, "convoy/group/" + name);
  BackendOptions options = config.options;
  if (backend == "convoy") options.try_emplace("name", name);
  auto made = factory(with_prefix(keys, "backend"), place.rank, place.size, config.timeout,
                      config.device, options);
  if (!made) {
    fail(ErrorKind::kInvalidArgument, "the factory of backend \"", backend, "\" made nothing");
  }
  return ProcessGroup::from(
      std::move(made),
      {.name = name, .store = with_prefix(keys, "groups"), .timeout = config.timeout});
}

Place meet(const std::string& method, std::optional<int> rank, std::optional<int> size,
           std::chrono::milliseconds timeout) {
  auto meeting = rendezvous({.method = method, .rank = rank, .size = size, .timeout = timeout});
  return {std::move(meeting.store), meeting.rank, meeting.size};
}

}  // namespace

ProcessGroup init(const InitOptions& options) {
  auto existing = default_group().lock();
  if (*existing) {
    if (!same((*existing)->options, options)) {
      fail(ErrorKind::kInvalidArgument,
           "init: the default group was made with other options; make another with new_group()");
    }
    return (*existing)->group;
  }
  find_backend(options.backend, options.options);  // before anybody waits
  const auto place = meet(options.method, options.rank, options.size, options.timeout);
  auto group =
      make_group(options.backend,
                 {.timeout = options.timeout, .name = "world", .options = options.options}, place);
  existing->emplace(Default{options, group});
  return group;
}

ProcessGroup new_group(const std::string& backend, const GroupConfig& config) {
  find_backend(backend, config.options);
  if (!config.store) {
    return make_group(backend, config, meet("env://", config.rank, config.size, config.timeout));
  }
  if (!config.rank || !config.size) {
    fail(ErrorKind::kInvalidArgument,
         "new_group: with a store of your own, say .rank and .size too");
  }
  return make_group(backend, config, {config.store, *config.rank, *config.size});
}

ProcessGroup reconfigure(const ProcessGroup& group, const GroupConfig& config) {
  if (!config.store || !config.rank || !config.size || config.name.empty()) {
    fail(ErrorKind::kInvalidArgument,
         "reconfigure: say .store, .rank, .size and .name, as the newcomers do for new_group");
  }
  if (config.name == group.name()) {
    fail(ErrorKind::kInvalidArgument, "reconfigure: the new group needs a name of its own, not \"",
         config.name, "\" again");
  }
  const auto backend = group.backend_name();
  find_backend(backend, config.options);
  group.abort();
  return new_group(backend, config);
}

GroupScope::GroupScope(ProcessGroup group) : outer_(scoped_group()) {
  if (!group) fail(ErrorKind::kInvalidArgument, "GroupScope: there is no group");
  scoped_group() = std::move(group);
}

GroupScope::~GroupScope() { scoped_group() = std::move(outer_); }

ProcessGroup current_group() {
  if (scoped_group()) return scoped_group();
  auto existing = default_group().lock();
  if (!*existing) {
    fail(ErrorKind::kInvalidArgument,
         "current_group: no GroupScope on this thread, and convoy::init() has not been called");
  }
  return (*existing)->group;
}

}  // namespace convoy
