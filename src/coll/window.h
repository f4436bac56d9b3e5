#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "coll/group.h"
#include "coll/mesh.h"
#include "os/fork_guard.h"
#include "os/wait.h"

namespace convoy::coll {

// Memory of every rank of one host that all others read and write as they like, and words by which
// they tell each other that they have. Thread-safe; what is written and read where, and when, is
// the users' affair.
//
// A forked child may go on using memory that at() gave before the fork; at(), signal() and
// wait_signal() throw kUnsupported there.
//
// A rank takes part until its Window is destroyed. Its memory is kept apart until then by the
// others: what they write after its end, or after its death, harms nobody.
class Window {
 public:
  // Collective. `memory` is group memory of this rank, which the caller keeps alive; it may be
  // empty. kUnsupported where ranks do not share memory, kInvalidArgument for private memory (on
  // all ranks).
  static std::shared_ptr<Window> create(Group& group, std::span<std::byte> memory,
                                        std::chrono::nanoseconds timeout = {});
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(parts_.size()); }
  // A rank's memory here. kPeerLost if it is gone. What was handed out before stays mapped.
  std::span<std::byte> at(int rank) const;

  // One signal to a rank: what this one wrote before is seen by who has waited for it. kPeerLost.
  void signal(int rank) const;
  // Takes one signal of this rank's, and waits for it if there is none yet. kPeerLost if it never
  // comes, and when another rank dies: once for each death of which this window has not told
  // before. kTimeout.
  void wait_signal(int rank, const Deadline& deadline) const;

 private:
  class Bell;
  struct Head;
  struct Part {
    std::span<std::byte> memory;
    std::shared_ptr<const Segment> mapping;  // nullptr: memory of this process
  };

  Window(Group& group, std::shared_ptr<Mesh> mesh);
  void join(Group& group, std::span<std::byte> memory, std::chrono::nanoseconds timeout);
  Head& head(int rank) const;
  std::atomic<std::uint64_t>& count(int from, int to) const;
  // kUnsupported in a forked child; kInvalidArgument for a rank that does not exist.
  void check_call(const char* operation, int rank) const;
  // Why the rank takes part no more; empty: it does.
  std::string absence(int rank) const;
  [[noreturn]] void fail_absent(const char* operation, int rank) const;
  class News;
  std::string prefix(const char* operation) const;

  const std::string name_;
  const int rank_;
  const std::shared_ptr<Mesh> mesh_;
  const HomeProcess home_;
  const WaitPolicy policy_;
  std::vector<Part> parts_;
  shm::Block control_block_;  // of rank 0
  std::shared_ptr<const Segment> control_mapping_;
  std::byte* control_ = nullptr;
  std::uint64_t nonce_ = 0;
  std::shared_ptr<Bell> bell_;
  // Signals taken, by rank.
  mutable std::vector<std::atomic<std::uint64_t>> taken_;
  // By rank: an error of this window has told that it is gone.
  mutable std::vector<std::atomic<bool>> told_;
};

}  // namespace convoy::coll
