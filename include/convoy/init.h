#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "convoy/group.h"
#include "convoy/store.h"

namespace convoy {

inline constexpr std::chrono::milliseconds kDefaultGroupTimeout = std::chrono::minutes(30);

// Options of a backend, by name. The factory of the backend defines them.
using BackendOptions = std::map<std::string, std::string>;

struct InitOptions {
  std::string backend = "convoy";
  std::string method = "env://";  // how ranks find each other: see convoy/rendezvous.h
  std::optional<int> rank = {};   // instead of what the launcher says
  std::optional<int> size = {};
  std::chrono::milliseconds timeout = kDefaultGroupTimeout;
  BackendOptions options = {};
};

// Makes the group of all ranks of the job, under torchrun, `convoy run`, mpirun or srun; without a
// launcher, a group of this process alone. Collective, blocks until all ranks have called it. It
// becomes the default group of the process, and later calls return it. Throws kInvalidArgument if a
// later call passes other options, kUnsupported in a forked child, and what rendezvous() and
// new_group() throw. After a failure it may be called again. Thread-safe.
ProcessGroup init(const InitOptions& options = {});

struct GroupConfig {
  std::chrono::milliseconds timeout = kDefaultGroupTimeout;  // of operations and of creation
  c10::Device device = c10::DeviceType::CPU;
  std::shared_ptr<Store> store = nullptr;  // nullptr: rendezvous("env://"), also for rank, size
  std::optional<int> rank = {};
  std::optional<int> size = {};
  // Required if several threads make groups on one store at the same time. Ranks match groups of
  // the same name by the order in which they make them.
  std::string name = {};
  BackendOptions options = {};
};

// Makes a new group, which is in no registry. Collective, blocks until all of its ranks have called
// it. Throws kInvalidArgument for an unknown backend or option, or for a store without rank and
// size. Throws kUnsupported for a backend or device that is not available. These are thrown before
// other ranks are contacted. Throws kTimeout if ranks are missing. Thread-safe.
//
// Options of "convoy": threads (of one large operation; 1), read_private (true or false; true),
// compare_shapes (of the tensors of an operation; true unless CONVOY_COMPARE_SHAPES=0), name (for
// messages; default: the group's).
ProcessGroup new_group(const std::string& backend, const GroupConfig& config = {});

// Replaces `group` by a group with other members. Collective, blocks. The old group ends: its
// pending operations fail on all ranks. Remaining members call this; newcomers call new_group()
// with the same store, name and size. The program assigns the ranks. `config` must have store,
// rank, size and a new name: otherwise throws kInvalidArgument. On backend "convoy", processes of
// `group` that are not in the new one are killed, as by ProcessGroup::shrink.
ProcessGroup reconfigure(const ProcessGroup& group, const GroupConfig& config);

// Makes a backend. Each rank of a new group calls it. No other group uses the keys of `store`.
using BackendFactory = std::function<c10::intrusive_ptr<c10d::Backend>(
    const std::shared_ptr<Store>& store, int rank, int size, std::chrono::milliseconds timeout,
    c10::Device device, const BackendOptions& options)>;

// Registers a backend for new_group and init. `options` are the option names that it accepts;
// others are rejected. Throws kInvalidArgument if the name is empty or taken, or if there is no
// factory. Thread-safe.
void register_backend(const std::string& name, BackendFactory factory,
                      std::vector<std::string> options = {});
// Names of all registered backends, sorted. Thread-safe.
std::vector<std::string> backend_names();

// Makes a group the current group of this thread until the scope ends, also by an exception. Scopes
// nest. Destroy a scope on the thread that made it. Throws kInvalidArgument for an empty group.
class [[nodiscard]] GroupScope {
 public:
  explicit GroupScope(ProcessGroup group);
  ~GroupScope();
  GroupScope(const GroupScope&) = delete;
  GroupScope& operator=(const GroupScope&) = delete;

 private:
  ProcessGroup outer_;
};

// The group of the innermost scope on this thread. Outside of all scopes: the default group of
// init(). Throws kInvalidArgument if there is neither.
ProcessGroup current_group();

}  // namespace convoy
