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

#include "base/guarded.h"
#include "coll/medium.h"
#include "coll/mesh.h"
#include "coll/workers.h"
#include "convoy/error.h"

namespace convoy::coll {

class Movement;
struct Speaker;

struct EngineOptions {
  std::string name;          // of the group, for messages
  int threads = 1;           // that work on one operation of this rank, the caller's included
  bool read_private = true;  // out of other processes, where the kernel allows it
  std::function<std::map<int, std::string>()> ended = {};  // as of MeshOptions
  Deadline deadline = Deadline::after(Store::kDefaultTimeout);
};

// Runs the collectives of one rank of one group, one at a time, on the calling thread. Its owner
// (Group) keeps the order and never calls run() twice at once; abort(), close() and the queries may
// be called from any thread meanwhile.
//
// How an operation travels: every rank writes its signature, and its data if it is small, into its
// slot and sets `arrived`; a rank that has seen all arrivals has all signatures and compares them.
// Small data is then taken from the slots. Large data in shared memory is combined in place, chunk
// by chunk, by whichever rank takes a chunk first, or copied from where it is. Other large data
// goes through staging buffers in rounds. Sources are always combined in the order of ranks.
class Engine : public Medium {  // all of it but messages()
 public:
  // Collective: all ranks call it.
  Engine(Store& store, int rank, int size, const EngineOptions& options);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine() override;

  int rank() const final { return rank_; }
  int size() const final { return size_; }
  const std::string& name() const final { return name_; }
  const Mesh& mesh() const { return *mesh_; }
  const std::shared_ptr<Mesh>& shared_mesh() const { return mesh_; }

  // Throws Error:
  // - ranks disagree: kInvalidArgument on all of them, the group stays usable;
  // - a rank is gone (kPeerLost), late (kTimeout), or the group was aborted: the group is broken,
  //   and every later operation throws the same cause at once.
  void run(const Call& call, std::uint64_t number) final;

  void abort(const std::string& why) noexcept final;
  void close() noexcept final;
  bool broken() const final;
  std::optional<ErrorKind> failure() const final;
  std::vector<int> lost_ranks() const final;
  // The rank has noticed that the group is broken, or has left: it touches nobody's memory any more
  // on behalf of this group.
  bool has_given_up(int rank) const { return gave_up(layout_.rank(base_, rank)); }
  std::vector<int> late_ranks() final { return *late_ranks_.lock(); }
  // Wakes everyone who sleeps in this group, on every rank.
  void wake_all() noexcept;
  std::uint64_t last_completed() const final { return completed_.load(std::memory_order_acquire); }
  // Private ones are never touched by others; shared ones are kept apart (quarantine_buffers).
  bool holds_buffers() const final { return false; }

 private:
  friend class Mail;  // messages, which share the group's memory and its failures

  // The watch thread's way to wake this rank.
  struct Bell final : shm::Alarm {
    Bell(WaitWord& all, WaitWord& own) : bell(&all), mail(&own) {}
    void ring() noexcept override;

    // Written by the watch thread (seq_cst, before the bell rings), read while waiting.
    std::atomic<bool> rung{false};
    std::mutex mutex;
    WaitWord* bell;  // guarded by mutex; nullptr once the engine is gone
    WaitWord* mail;
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
  // How long one sleep lasts at most.
  Deadline nap(const Running& running) const;
  bool troubled() const;
  void check_failed(const Running& running);
  bool gone(int rank, std::uint64_t number) const;
  // A rank that is gone, whatever it did before; -1: there is none.
  int casualty(std::uint64_t number) const;
  // For a rank that waits for a late one while another is gone, which had done its part: the
  // operation fails now, on all ranks, unless it has completed on some. False: it completes.
  template <class Ready>
  bool give_up_together(std::uint64_t number, Ready ready);
  bool decide(std::uint64_t number, bool complete);
  // At the end of an operation that was doubted.
  void confirm(const Running& running);
  std::string describe_gone(int rank) const;
  // What a rank that is waited for does instead of its part.
  std::string describe_late(int rank, const std::string& missing) const;
  std::string describe_activity(int rank) const;
  [[noreturn]] void fail_peer(const Running& running, int rank);
  [[noreturn]] void fail_late(const Running& running, const std::vector<int>& late);
  [[noreturn]] void fail_run(const Running& running, ErrorKind kind, const std::string& cause);
  void record_failure(std::uint64_t number, ErrorKind kind, const std::string& cause) noexcept;
  std::pair<ErrorKind, std::string> recorded_cause() const;
  Speaker speaker(const Running& running) const;
  std::string prefix(const Running& running) const;

  static bool gave_up(const RankHead& head);
  std::function<bool()> all_gave_up() const;
  void quarantine_buffers(const Running& running);

  // The end of this rank's part.
  void leave() noexcept;

  // --- operations ---
  struct ReducePlan;
  enum class Side { kInput, kOutput };

  // engine.cpp
  void arrive(const Running& running);
  void offer_data(const Call& call, std::uint64_t number, Slot& mine);
  void move_data(const Running& running);
  void compare_signatures(const Running& running);
  void compare_tables(const Running& running);
  std::vector<std::string> exchange_texts(const Running& running, std::string_view mine);
  [[noreturn]] void fail_pair(const Running& running, int source, int target);
  Carrier carrier_of(const Running& running, int rank, std::size_t contribution);
  void check_members(const Running& running);
  void publish_step(std::uint64_t step);
  void wait_steps(const Running& running, std::uint64_t step);
  std::byte* peer_memory(const Running& running, int rank, const shm::Location& location,
                         std::size_t bytes);
  View peer_view(const Running& running, int rank, Side side, const View& like);
  std::span<const shm::Location> peer_places(const Running& running, int rank, std::size_t first,
                                             std::size_t count);
  // For what no sound rank writes.
  [[noreturn]] void fail_nonsense(const Running& running, int rank);
  // Between memory of this rank's, which may be in several stretches, and a buffer.
  void copy_from(const View& source, std::size_t begin, std::byte* to, std::size_t length,
                 StoreHint hint);
  void copy_to(const View& target, std::size_t begin, const std::byte* from, std::size_t length,
               StoreHint hint);

  // chunks.cpp
  // Calls part(begin, length) for chunks of [0, bytes), each on one rank, whichever comes first.
  // Returns when all of them are done everywhere.
  using ChunkPart = std::function<void(std::size_t begin, std::size_t length)>;
  void take_chunks(const Running& running, std::size_t bytes, const ChunkPart& part);

  // reduce.cpp
  void combine(const Running& running);
  bool find_buffers(const Running& running, const ReducePlan& plan);
  void reduce_range(const Running& running, const ReducePlan& plan, std::size_t begin,
                    std::size_t length, StoreHint hint);
  void combine_tiny(const Running& running);
  void combine_small(const Running& running, const ReducePlan& plan);
  void combine_in_place(const Running& running, const ReducePlan& plan, StoreHint hint);
  void combine_staged(const Running& running, const ReducePlan& plan, Way way);

  // move.cpp
  void move(const Running& running);
  bool is_staged(const Running& running, int source, std::size_t contribution, Way way);
  void keep_own(const Movement& movement, StoreHint hint);
  void keep_own(const Movement& movement, std::size_t begin, std::size_t length, StoreHint hint);
  void pull(const Running& running, const Movement& movement, Way way);
  bool can_share_broadcast(const Running& running);
  void share_broadcast(const Running& running, StoreHint hint);
  void pull_shared(const Running& running, const Movement& movement, int source, StoreHint hint);
  void move_staged(const Running& running, const Movement& movement, Way way);
  bool reads_private(const Running& running);
  void read_private(const Running& running, int source, std::uint64_t address, const View& target);

  Slot& slot(int rank, std::uint64_t number) const { return head(rank).slots[number & 1]; }
  RankHead& head(int rank) const { return layout_.rank(base_, rank); }
  GroupHead& group() const { return layout_.group(base_); }
  // What rank 0 chose for this operation, and its note of how it went.
  Way chosen(const Running& running, Route route) const {
    const Way way = slot(0, running.number).ways[static_cast<std::size_t>(route)];
    return static_cast<int>(way) < kWays ? way : Way::kCached;  // it stands in shared memory
  }
  // Elements that have to be widened take longer a byte than others.
  static int tuned_kind(const Call& call) {
    return 2 * static_cast<int>(call.signature.op) + (call.element() < 4 ? 1 : 0);
  }
  template <class Operation>
  void tuned(const Running& running, Route route, Operation operation);

  const int rank_;
  const int size_;
  const std::string name_;
  const Layout layout_;
  std::shared_ptr<Mesh> mesh_;
  std::byte* base_ = nullptr;
  WaitPolicy policy_;
  std::shared_ptr<Bell> bell_;
  Guarded<std::vector<int>> late_ranks_;
  Workers workers_;
  std::optional<Tuner> tuner_;  // of rank 0
  std::uint64_t step_ = 0;      // this rank's steps so far; equal in all ranks between operations
  std::atomic<std::uint64_t> started_{0};
  std::atomic<std::uint64_t> completed_{0};
  std::atomic<bool> closing_{false};
  const bool may_read_private_;
  std::optional<bool> reads_private_;  // once it is known; equal on all ranks
  // Scratch of run(), by rank.
  std::vector<View> readable_;  // inputs within reach; without data: they are not
  std::vector<View> writable_;
  std::vector<std::vector<Stretch>> stretches_;  // of other ranks' inputs, then of their outputs
  std::vector<std::uint64_t> counts_;            // elements, by source and target
};

}  // namespace convoy::coll
