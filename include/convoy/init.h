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

// Options of a backend by name, as its factory knows them.
using BackendOptions = std::map<std::string, std::string>;

struct InitOptions {
  std::string backend = "convoy";
  std::string method = "env://";  // how ranks meet: see convoy/rendezvous.h
  std::optional<int> rank = {};   // instead of what the launcher says
  std::optional<int> size = {};
  std::chrono::milliseconds timeout = kDefaultGroupTimeout;
  BackendOptions options = {};
};

// The group of all ranks of the job: under torchrun, `convoy run`, mpirun or srun, or of this
// process alone. Collective. It becomes the process's default group: a second call returns the same
// one; kInvalidArgument if it asks for something else. Thread-safe. Throws what rendezvous() and
// new_group() throw; after a failure it may be called again.
ProcessGroup init(const InitOptions& options = {});

struct GroupConfig {
  std::chrono::milliseconds timeout = kDefaultGroupTimeout;  // of operations, and of making it
  c10::Device device = c10::DeviceType::CPU;
  std::shared_ptr<Store> store = nullptr;  // nullptr: rendezvous("env://"), rank and size with it
  std::optional<int> rank = {};
  std::optional<int> size = {};
  // Threads that make groups on one store at the same time must name them. Ranks match groups of
  // equal names by the order in which they make them.
  std::string name = {};
  BackendOptions options = {};
};

// A group of its own, in no registry. Collective among its ranks. kInvalidArgument for an unknown
// backend or option, kUnsupported for a backend or device that is not available, both before it
// contacts other ranks; kTimeout if ranks are missing. Thread-safe.
//
// Options of "convoy": threads (of one large operation; 1), read_private (true or false; true),
// compare_shapes (of the tensors of an operation; true unless CONVOY_COMPARE_SHAPES=0), name (in
// messages; the group's).
ProcessGroup new_group(const std::string& backend, const GroupConfig& config = {});

// Replaces `group` by a group with other members. The old group ends: its pending operations fail
// on all ranks. Remaining members call this; new ones call new_group() with the same store, name
// and size. The callers agree on the ranks. `config` must have store, rank, size and name.
// Processes of `group` that are not in the new one are killed, as by ProcessGroup::shrink.
ProcessGroup reconfigure(const ProcessGroup& group, const GroupConfig& config);

// Makes a backend; called by every rank of a new group. The store's keys are the group's alone.
using BackendFactory = std::function<c10::intrusive_ptr<c10d::Backend>(
    const std::shared_ptr<Store>& store, int rank, int size, std::chrono::milliseconds timeout,
    c10::Device device, const BackendOptions& options)>;

// Makes a name known to new_group and init. `options` are the names that it takes; others are
// refused. kInvalidArgument if the name is taken. Thread-safe.
void register_backend(const std::string& name, BackendFactory factory,
                      std::vector<std::string> options = {});
// Sorted.
std::vector<std::string> backend_names();

// Makes a group this thread's current one until the scope ends, also by an exception. Scopes nest,
// on one thread.
class [[nodiscard]] GroupScope {
 public:
  explicit GroupScope(ProcessGroup group);
  ~GroupScope();
  GroupScope(const GroupScope&) = delete;
  GroupScope& operator=(const GroupScope&) = delete;

 private:
  ProcessGroup outer_;
};

// The group of the innermost scope on this thread; outside of all, the default group of init().
// kInvalidArgument if there is neither.
ProcessGroup current_group();

}  // namespace convoy
