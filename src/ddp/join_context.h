#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "convoy/join.h"

namespace convoy {

// A step that failed on all ranks alike: those that have no more inputs wait for the next one. Not
// a std::exception, so that no handler of the user's catches it.
struct JoinStepFailed {};

// What live ranks announce. All that ranks without inputs do is to answer such calls.
enum class JoinCall : std::uint8_t {
  kStep = 1,    // all hooks' main_hook, in their order
  kBuffers,     // the buffers of one joinable
  kStatistics,  // of a SyncBatchNorm; the detail is its business
};

// A hook that also answers calls of one joinable alone.
class JoinBuffersHook : public JoinHook {
 public:
  virtual void buffers_hook(const JoinStep& step) = 0;
};

// One Join on one rank. Every call of a live rank is announced by one message, an all-gather of 16
// bytes from each rank:
//   0  state
//   1  call
//   2  (zero)
//   8  detail of the call, little-endian
// so that all ranks know who is live and what comes, and can tell when they differ.
class JoinContext : public std::enable_shared_from_this<JoinContext> {
 public:
  JoinContext(std::vector<Joinable*> joinables, const JoinOptions& options);
  ~JoinContext();
  JoinContext(const JoinContext&) = delete;
  JoinContext& operator=(const JoinContext&) = delete;

  // To be called when it is owned by a shared_ptr.
  void start();
  // By a live rank, before the collectives of a step.
  JoinStep notify(const Joinable& joinable);
  // By a live rank, before others.
  JoinStep call(JoinCall call, std::uint64_t detail);
  JoinStep call_buffers(const Joinable& joinable) {
    return call(JoinCall::kBuffers, index_of(joinable));
  }
  void finish();
  void abandon(const std::string& why) noexcept;
  // For a rank that leaves without a word.
  void drop() noexcept;

  // All ranks of the group.
  std::vector<int> everybody() const;
  bool throws_early() const { return options_.throw_on_early_termination; }
  bool is_live() const { return state_ == State::kLive; }

  // Of this group's backend; nullptr if there is none.
  static std::shared_ptr<JoinContext> of(const ProcessGroup& group);

 private:
  enum class State : std::uint8_t { kLive = 1, kJoined, kFailed, kOver };
  struct Record {
    State state;
    JoinCall call;
    std::uint64_t detail;
  };

  std::vector<Record> exchange(const Record& mine);
  std::vector<Record> meet(const Record& mine);
  std::string texts_of_failed(const std::vector<Record>& all);
  void shadow(const Record& what, const JoinStep& step);
  std::size_t index_of(const Joinable& joinable) const;
  void end();
  std::string head() const;

  const std::vector<Joinable*> joinables_;
  const JoinOptions options_;
  ProcessGroup group_;
  std::vector<std::unique_ptr<JoinHook>> hooks_;
  at::Tensor records_;  // in group memory, reused
  State state_ = State::kLive;
  std::string why_;         // this rank has failed
  JoinStep step_;           // the last one
  std::vector<bool> used_;  // by joinable, in that step
  std::uint64_t steps_ = 0, shadowed_ = 0;
};

// What the joined ranks of SyncBatchNorms do; see sync_batch_norm.cpp.
void shadow_statistics(const ProcessGroup& group, std::uint64_t detail);
// True if there are SyncBatchNorms of this group, whose calls come while a backward runs.
bool has_sync_batch_norms(const ProcessGroup& group);

}  // namespace convoy
