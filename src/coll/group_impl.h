#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "base/concat.h"
#include "coll/calls.h"
#include "coll/group.h"
#include "coll/medium.h"
#include "coll/observer.h"
#include "os/fork_guard.h"

namespace convoy::coll {

// What a Work stands for.
struct Work::Operation {
  explicit Operation(std::shared_ptr<Group::Impl> in) : group(std::move(in)) {}
  virtual ~Operation() = default;

  virtual bool is_done() = 0;
  virtual bool wait_until(const Deadline& deadline) = 0;
  virtual std::uint64_t sequence() const { return 0; }
  virtual int sender() { return -1; }

  std::shared_ptr<Group::Impl> group;
};

struct Work::Collective final : Work::Operation {
  using Operation::Operation;
  bool is_done() override;
  bool wait_until(const Deadline& deadline) override;
  std::uint64_t sequence() const override { return number; }

  Call call;
  std::vector<std::int64_t> sizes;  // of call.shape
  std::uint64_t number = 0;
  Observer::Seen seen;
  Group::Callback callback;
  // Guarded by the group's mutex:
  bool done = false;
  std::exception_ptr error;
};

// One message, or a batch.
struct Work::Messages final : Work::Operation {
  using Operation::Operation;
  bool is_done() override;
  bool wait_until(const Deadline& deadline) override;
  int sender() override;

  std::vector<std::shared_ptr<Transfer>> transfers;
};

// Keeps the order. An operation gets its number when it is issued; it runs when all before it have:
// on the progress thread, or on a thread that waits for it, whichever is there first.
class Group::Impl : public std::enable_shared_from_this<Group::Impl> {
 public:
  Impl(std::shared_ptr<Medium> medium, std::chrono::nanoseconds timeout, std::vector<int> job_ranks)
      : timeout_(timeout),
        job_ranks_(std::move(job_ranks)),
        medium_(std::move(medium)),
        messages_(medium_->messages()),
        observer_(*medium_),
        calls_(medium_->name(), medium_->rank(), medium_->size()) {}

  // For operations that have none of the checks below. kUnsupported in a forked child, before
  // anything shared, or a lock that a missing thread may hold, is touched.
  void check_process(std::string_view operation) const {
    if (!home_.is_here()) [[unlikely]]
      fail_in_child(operation);
  }
  bool is_here() const noexcept { return home_.is_here(); }

  Medium& medium() { return *medium_; }
  Medium& checked_medium(std::string_view operation) {
    check_process(operation);
    return *medium_;
  }
  const std::shared_ptr<Medium>& shared_medium() const { return medium_; }

  const std::vector<int>& job_ranks() const { return job_ranks_; }  // empty: not known
  const CallMaker& calls() const { return calls_; }
  Messages& messages() { return messages_; }
  Observer& observer() { return observer_; }

  // Checked; without a deadline.
  Transfer transfer(const Message& message) const;
  Deadline deadline(std::chrono::nanoseconds timeout,
                    Deadline::Clock::time_point now = Deadline::Clock::now()) const {
    return Deadline::after(timeout.count() == 0 ? timeout_ : timeout, now);
  }

  void run(Call call);
  void run(Transfer& transfer, const Observer::Seen& seen, std::chrono::nanoseconds timeout);
  std::shared_ptr<Work::Collective> issue(Call call, Callback done);
  bool wait(Work::Collective& operation, const Deadline& deadline);
  bool is_done(const Work::Collective& operation);
  void close();
  // Of a broken group: waits until no thread of this rank is inside an operation. What is queued
  // fails without touching anything. False: the deadline passed first.
  bool settle(const Deadline& deadline);
  std::string describe() const {
    return concat("group \"", medium_->name(), "\", rank ", medium_->rank(), " of ",
                  medium_->size());
  }
  std::uint64_t last_issued() {
    check_process("last_issued");
    const std::lock_guard lock(mutex_);
    return last_number_;
  }

 private:
  // A callback that runs, and has the turn as long as it does; inside of `outer`'s, where it is
  // that of an operation that the other one issued.
  struct CallingBack {
    std::thread::id thread;
    CallingBack* outer = nullptr;
    int depth = 1;
    bool gave_turn = false;
  };

  [[noreturn]] void fail_in_child(std::string_view operation) const;
  void check_open(OpKind op) const;
  bool calls_back_here() const {
    return calling_back_ && calling_back_->thread == std::this_thread::get_id();
  }
  void start_progress();
  void give_turn();
  void end_callback(CallingBack& call);
  void progress();
  void finish(Work::Collective& operation, const std::exception_ptr& error);
  void run_next(std::unique_lock<std::mutex>& lock);
  void release_turn();

  const HomeProcess home_;
  const std::chrono::nanoseconds timeout_;
  const std::vector<int> job_ranks_;
  const std::shared_ptr<Medium> medium_;
  Messages& messages_;  // the medium's
  Observer observer_;
  const CallMaker calls_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  std::deque<std::shared_ptr<Work::Collective>> queue_;
  std::uint64_t last_number_ = 0;
  bool busy_ = false;  // some thread runs an operation
  bool closed_ = false;
  int waiting_ = 0;                      // threads in changed_.wait
  CallingBack* calling_back_ = nullptr;  // the innermost of the thread that has the turn
  std::thread progress_;
  std::vector<std::thread> retired_;  // were progress_, and end with the callback they are in
};

}  // namespace convoy::coll
