#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "coll/types.h"
#include "convoy/deadline.h"
#include "convoy/store.h"
#include "transport/shm/fabric.h"

namespace convoy::coll {

struct GroupOptions {
  std::string name = "world";
  // Of every operation that does not bring its own, and of making the group.
  std::chrono::nanoseconds timeout = std::chrono::minutes(30);
  // Threads that work on one large operation of this rank, the caller's included.
  int threads = 1;
};

struct CallOptions {
  std::chrono::nanoseconds timeout{0};  // 0: the group's
  std::uint64_t tag = 0;                // must be equal on all ranks; part of the fingerprint
};

struct ReduceOptions {
  ReduceOp op = ReduceOp::kSum;
  double factor = 1;  // of kPremulSum
  std::chrono::nanoseconds timeout{0};
  std::uint64_t tag = 0;
};

class Group;

// An operation under way. Copies share it. Thread-safe.
class [[nodiscard]] Work {
 public:
  Work() = default;

  std::uint64_t number() const;
  bool done() const;
  // Waits for it, and runs it on this thread if it is its turn and nobody runs it yet. Rethrows its
  // error. False: `timeout` passed first; the operation goes on until its own deadline.
  bool wait(std::chrono::nanoseconds timeout);
  void wait();

 private:
  friend class Group;
  struct Operation;
  explicit Work(std::shared_ptr<Operation> operation) : operation_(std::move(operation)) {}

  std::shared_ptr<Operation> operation_;
};

// Ranks of one host that move bytes together. Operations of a group run in the order in which they
// are issued, which must be the same on all ranks; groups are independent of each other. Methods
// may be called from any thread, but then it is the caller who keeps the order equal on all ranks.
//
// Synchronous calls run on the calling thread and allocate nothing; asynchronous ones on the
// group's progress thread, started by the first of them. All throw Error; what an error leaves is
// said in docs/collectives.md.
class Group {
 public:
  // Called when an operation has finished, on the thread that finished it; nullptr: it succeeded.
  // Must not throw and must not wait for this group.
  using Callback = std::function<void(std::exception_ptr)>;

  // Collective: returns when all `size` ranks have called it. The store's keys must be fresh
  // (with_prefix). kTimeout names the ranks that did not come.
  static std::shared_ptr<Group> create(std::shared_ptr<Store> store, int rank, int size,
                                       const GroupOptions& options = {});
  // Leaves the group; pending operations fail. Does not wait for other ranks.
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const;
  int size() const;
  const std::string& name() const;

  // output[k] = op over all ranks of input[k]. `input` may be `output`; other overlaps are errors.
  void all_reduce(const void* input, void* output, std::size_t count, DataType type,
                  const ReduceOptions& options = {});
  // The root's input to every rank's output. Only the root's input is read.
  void broadcast(const void* input, void* output, std::size_t count, DataType type, int root,
                 const CallOptions& options = {});
  void barrier(const CallOptions& options = {});

  // The same, without waiting: buffers belong to the operation until it is done.
  Work all_reduce_async(const void* input, void* output, std::size_t count, DataType type,
                        const ReduceOptions& options = {}, Callback done = nullptr);
  Work broadcast_async(const void* input, void* output, std::size_t count, DataType type, int root,
                       const CallOptions& options = {}, Callback done = nullptr);
  Work barrier_async(const CallOptions& options = {}, Callback done = nullptr);

  // Memory that all ranks of the host can work on in place: operations on it copy nothing. Local;
  // aligned to pages, not cleared. Throws kResource before the machine or its cgroup runs out.
  shm::Block allocate(std::size_t bytes);

  // Breaks the group on every rank: pending and later operations fail everywhere, naming this rank.
  void abort(const std::string& why);
  // Leaves as the destructor does; operations under way and later ones fail on this rank.
  void close();
  bool broken() const;
  // Number of the last operation that completed here.
  std::uint64_t last_completed() const;

  class Impl;  // opaque

 private:
  explicit Group(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

  // Shared with the Work objects, which may outlive the group.
  std::shared_ptr<Impl> impl_;
};

}  // namespace convoy::coll
