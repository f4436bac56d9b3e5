#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "coll/control.h"
#include "coll/kernels.h"
#include "coll/mesh.h"
#include "coll/workers.h"
#include "convoy/error.h"

namespace convoy::coll {

// One collective operation as a rank asked for it.
struct Call {
  Signature signature;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;  // may be `input`
  Deadline deadline = Deadline::never();

  std::size_t bytes() const { return signature.count * size_of(signature.type); }
  Reduction reduction(int ranks) const;
};

struct EngineOptions {
  std::string name;  // of the group, for messages
  int threads = 1;   // that work on one operation of this rank, the caller's included
  Deadline deadline = Deadline::after(Store::kDefaultTimeout);
};

// Runs the collectives of one rank of one group, one at a time, on the calling thread. Its owner
// (Group) keeps the order and never calls run() twice at once; abort(), close() and the queries may
// be called from any thread meanwhile.
//
// How an operation travels: every rank writes its signature, and its data if it is small, into its
// slot and sets `arrived`; a rank that has seen all arrivals has all signatures and compares them.
// Small data is then reduced from the slots. Large data in shared memory is reduced in place, chunk
// by chunk, by whichever rank takes a chunk first. Other large data goes through staging buffers in
// rounds. Sources are always combined in the order of ranks.
class Engine {
 public:
  // Collective: all ranks call it.
  Engine(Store& store, int rank, int size, const EngineOptions& options);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine();

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }
  const shm::Mesh& mesh() const { return *mesh_; }

  // Runs operation `number` (1, 2, 3, ... in every rank). Throws Error:
  // - ranks disagree: kInvalidArgument on all of them, the group stays usable;
  // - a rank is gone (kPeerLost), late (kTimeout), or the group was aborted: the group is broken,
  // and
  //   every later operation throws the same cause at once.
  void run(const Call& call, std::uint64_t number);

  // Breaks the group on all ranks; `why` goes into their messages.
  void abort(const std::string& why) noexcept;
  // Wakes a run() of this rank and lets it fail; the rank then leaves the group. Idempotent.
  void close() noexcept;
  bool broken() const;
  std::uint64_t last_completed() const { return completed_.load(std::memory_order_acquire); }

 private:
  // The watch thread's way to wake this rank.
  struct Bell final : shm::Alarm {
    explicit Bell(WaitWord& word) : bell(&word) {}
    void ring() noexcept override;

    // Written by the watch thread (seq_cst, before the bell rings), read while waiting.
    std::atomic<bool> rung{false};
    std::mutex mutex;
    WaitWord* bell;  // guarded by mutex; nullptr once the engine is gone
  };
  // The operation under way, for messages.
  struct Running {
    const Call* call;
    std::uint64_t number;
  };

  // --- waiting (engine_wait.cpp) ---
  // Waits until ready() is true. On an alarm blocker() names a rank that will never make it true
  // (-1: none), and lagging() the ranks that have not yet done their part, for a deadline's
  // message.
  template <class Ready, class Blocker, class Lagging>
  void wait(const Running& running, Ready ready, Blocker blocker, Lagging lagging);
  // For flags that every rank sets for itself.
  template <class Flag>
  void wait_all(const Running& running, Flag flag);
  void ring_sleepers() noexcept;
  static const Deadline& call_deadline(const Running& running) { return running.call->deadline; }
  bool troubled() const;
  void check_failed(const Running& running);
  bool gone(int rank, std::uint64_t number) const;
  std::string describe_gone(int rank) const;
  [[noreturn]] void fail_peer(const Running& running, int rank);
  [[noreturn]] void fail_late(const Running& running, const std::vector<int>& late);
  [[noreturn]] void fail_run(const Running& running, ErrorKind kind, const std::string& cause);
  void record_failure(std::uint64_t number, ErrorKind kind, const std::string& cause) noexcept;
  std::pair<ErrorKind, std::string> recorded_cause() const;
  std::string prefix(const Running& running) const;

  void quarantine_buffers(const Running& running);

  // --- operations (engine.cpp, all_reduce.cpp, broadcast.cpp) ---
  void arrive(const Running& running);
  void move_data(const Running& running);
  void compare_signatures(const Running& running);
  void all_reduce(const Running& running);
  void reduce_small(const Running& running);
  void reduce_in_place(const Running& running, StoreHint hint);
  void reduce_staged(const Running& running, StoreHint hint);
  void broadcast(const Running& running);
  void broadcast_direct(const Running& running, StoreHint hint);
  void broadcast_staged(const Running& running, StoreHint hint);
  void publish_step(std::uint64_t step);
  void wait_steps(const Running& running, std::uint64_t step);
  std::byte* peer_memory(const Running& running, int rank, const shm::Location& location,
                         std::size_t bytes);

  Slot& slot(int rank, std::uint64_t number) const { return head(rank).slots[number & 1]; }
  RankHead& head(int rank) const { return layout_.rank(base_, rank); }
  GroupHead& group() const { return layout_.group(base_); }
  // What rank 0 chose for this operation, and its note of how it went.
  StoreHint hint(const Running& running, Route route) const {
    return slot(0, running.number).hints[static_cast<std::size_t>(route)];
  }
  template <class Operation>
  void tuned(const Running& running, Route route, Operation operation);

  const int rank_;
  const int size_;
  const std::string name_;
  const Layout layout_;
  std::shared_ptr<shm::Mesh> mesh_;
  std::byte* base_ = nullptr;
  WaitPolicy policy_;
  std::shared_ptr<Bell> bell_;
  Workers workers_;
  std::optional<Tuner> tuner_;  // of rank 0
  std::uint64_t step_ = 0;      // this rank's steps so far; equal in all ranks between operations
  std::atomic<std::uint64_t> completed_{0};
  std::atomic<bool> closing_{false};
  // Scratch of run(), sized once.
  std::vector<const std::byte*> sources_;
  std::vector<std::byte*> targets_;
  std::vector<std::byte*> inputs_;   // by rank; nullptr: private memory of another rank
  std::vector<std::byte*> outputs_;  // by rank
};

}  // namespace convoy::coll
