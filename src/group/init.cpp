#include "convoy/init.h"

#include "base/concat.h"
#include "base/error.h"
#include "base/guarded.h"
#include "coll/group.h"
#include "convoy/allocator.h"
#include "convoy/backend.h"
#include "convoy/rendezvous.h"
#include "group/launch_environment.h"
#include "group/registry.h"
#include "mpi/module.h"
#include "os/fork_guard.h"

namespace convoy {
namespace {

struct Default {
  InitOptions options;
  ProcessGroup group;
  HomeProcess home = {};
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

struct Meeting {
  std::shared_ptr<Store> store;
  int rank;
  int size;
};

// How often a group of this name was made among these ranks. Without a store by every process for
// itself: such groups have all ranks, so that all count alike.
std::int64_t next_number(const Meeting& place, const std::string& name) {
  if (place.store) return place.store->add(concat("convoy/groups/", place.rank, "/", name), 1);
  static auto* const counts = new Guarded<std::map<std::string, std::int64_t>>;
  return ++(*counts->lock())[name];
}

// Groups are numbered in the store, by rank and name: every rank counts alike, and a name can be
// used again.
ProcessGroup make_group(const std::string& backend, const GroupConfig& config,
                        const Meeting& place) {
  const auto factory = find_backend(backend, config.device, config.options);
  if (place.size < 1 || place.rank < 0 || place.rank >= place.size) {
    fail(ErrorKind::kInvalidArgument, "new_group: the rank must be from 0 to size - 1, got rank ",
         place.rank, " of ", place.size);
  }
  const auto number = next_number(place, config.name);
  const auto name = config.name.empty() ? concat("group-", number) : config.name;
  const auto below = [&](const char* part) -> std::shared_ptr<Store> {
    if (!place.store) return nullptr;
    return with_prefix(place.store, concat("convoy/group/", config.name, "/", number, "/", part));
  };
  BackendOptions options = config.options;
  if (backend == "convoy" || backend == "mpi") options.try_emplace("name", name);
  auto made =
      factory(below("backend"), place.rank, place.size, config.timeout, config.device, options);
  if (!made) {
    fail(ErrorKind::kInvalidArgument, "the factory of backend \"", backend, "\" returned nullptr");
  }
  return ProcessGroup::from(std::move(made),
                            {.name = name, .store = below("groups"), .timeout = config.timeout});
}

// MPI brings its ranks together itself, on any number of hosts, and knows who they are.
Meeting meet_in_mpi(std::optional<int> rank, std::optional<int> size) {
  const auto world = mpi::module().world();
  const auto said = read_launch_environment(current_variables(), {.rank = rank, .size = size},
                                            launcher_store() != nullptr);
  if (said.rank != world.rank || said.size != world.size) {
    fail(ErrorKind::kInvalidArgument, "backend \"mpi\": to MPI this is rank ", world.rank, " of ",
         world.size, ", but ", said.launcher == "none" ? "the caller" : said.launcher,
         " says rank ", said.rank, " of ", said.size, "; start the program with this MPI's mpirun");
  }
  return {nullptr, world.rank, world.size};
}

Meeting meet(const std::string& backend, const std::string& method, std::optional<int> rank,
             std::optional<int> size, std::chrono::milliseconds timeout) {
  if (backend == "mpi" && method == "env://") return meet_in_mpi(rank, size);
  auto meeting = rendezvous({.method = method, .rank = rank, .size = size, .timeout = timeout});
  return {std::move(meeting.store), meeting.rank, meeting.size};
}

}  // namespace

ProcessGroup init(const InitOptions& options) {
  auto existing = default_group().lock();
  if (*existing) {
    if (!(*existing)->home.is_here()) {
      fail(ErrorKind::kUnsupported,
           "init: this process is a forked child of a rank, whose group it cannot use; start it by "
           "exec (convoy::spawn, multiprocessing's \"spawn\"), or fork before init()");
    }
    if (!same(options, {}) && !same((*existing)->options, options)) {
      fail(ErrorKind::kInvalidArgument,
           "init: the default group was made with other options; make another with new_group()");
    }
    return (*existing)->group;
  }
  install_allocator_if_asked();
  find_backend(options.backend, c10::DeviceType::CPU, options.options);  // before anybody waits
  const auto place =
      meet(options.backend, options.method, options.rank, options.size, options.timeout);
  auto group =
      make_group(options.backend,
                 {.timeout = options.timeout, .name = "world", .options = options.options}, place);
  existing->emplace(Default{options, group});
  return group;
}

ProcessGroup new_group(const std::string& backend, const GroupConfig& config) {
  find_backend(backend, config.device, config.options);  // before anybody waits
  if (!config.store) {
    return make_group(backend, config,
                      meet(backend, "env://", config.rank, config.size, config.timeout));
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
  find_backend(backend, config.device, config.options);
  group.abort();
  // As in shrink: who is not in the new group must not touch the memory of those who are.
  const auto* const before = dynamic_cast<ConvoyBackend*>(group.backend().get());
  const bool shares = before != nullptr && before->shares_memory();
  const auto deadline = Deadline::after(config.timeout);
  if (shares) before->group().settle(deadline);
  auto made = new_group(backend, config);
  const auto* const after = dynamic_cast<ConvoyBackend*>(made.backend().get());
  if (shares && after != nullptr) before->group().fence(after->group().processes(), deadline);
  return made;
}

GroupScope::GroupScope(ProcessGroup group) : outer_(scoped_group()) {
  if (!group) fail(ErrorKind::kInvalidArgument, "GroupScope: the group is empty; pass one");
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
