#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "transport/endpoint.h"
#include "transport/shm/shm_delivery.h"
#include "transport/shm/shm_events.h"
#include "transport/shm/shm_remote.h"

namespace convoy::shm {

// Something that the thread that serves has to do.
struct Task {
  enum class Type { kLetter, kJoined, kLost, kRoom, kSent } type;
  ShmRemote* remote;
  std::vector<std::byte> entry = {};
  SentList sent = {};
};

// What is there to be done: rings to be read, tasks, large letters. Under the endpoint's mutex, but
// for the looks of any() and any_for_service(): each queue has its size beside it for them.
//
// A remote is in the queue of rings once or not at all (Incoming::queued). A letter of the thread
// that serves is in its hand or among the tasks, and in one of them.
class Backlog {
 public:
  using Serve = transport::Endpoint::Serve;

  // Without the lock.
  bool any(Serve serve) const noexcept {
    if (ring_count_.load() != 0 || transfer_count_[1].load() != 0) return true;
    return serve == Serve::kAll && any_for_service();
  }
  bool any_for_service() const noexcept {
    return task_count_.load() != 0 || transfer_count_[0].load() != 0;
  }

  // --- rings, which take turns ---

  bool has_ring() const { return !rings_.empty(); }
  ShmRemote& next_ring() { return *rings_.front(); }
  void add_ring(ShmRemote& remote) {
    if (remote.in().queued || remote.in().told) return;
    remote.in().queued = true;
    remote.in().burst = 0;
    rings_.push_back(&remote);
    ring_count_.store(rings_.size(), std::memory_order_relaxed);
  }
  // Of the one whose turn it is: nothing is in it.
  void remove_ring(ShmRemote& remote) {
    rings_.pop_front();
    ring_count_.store(rings_.size(), std::memory_order_relaxed);
    remote.in().queued = false;
  }
  // The same, where there is more for its next turn.
  void end_turn(ShmRemote& remote) {
    remote.in().burst = 0;
    rings_.pop_front();
    rings_.push_back(&remote);
  }

  // --- tasks, in their order ---

  bool has_task() const { return !tasks_.empty(); }
  // The caller rings for the thread that serves.
  void add_task(Task task) {
    tasks_.push_back(std::move(task));
    task_count_.store(tasks_.size());
  }
  Task take_task() {
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    task_count_.store(tasks_.size());
    return task;
  }
  std::deque<Task>& tasks() { return tasks_; }

  // What the thread that serves has taken and not delivered yet, in its hand.
  void keep_hand(Handful& hand) { hand_ = &hand; }
  bool is_kept(const Handful& hand) const { return hand_ == &hand; }
  // The turn has changed: what its last owner has not begun with becomes the first tasks.
  void take_over_hand();

  // --- large letters, by ParsedLetter::reply ---

  bool has_transfer(Serve serve) const {
    return has_transfer_of_reply() || (serve == Serve::kAll && !transfers_[0].empty());
  }
  bool has_transfer_of_reply() const { return !transfers_[1].empty(); }
  void add_transfer(bool reply, std::unique_ptr<Transfer> transfer) {
    transfers_[reply].push_back(std::move(transfer));
    transfer_count_[reply].store(transfers_[reply].size());
  }
  std::unique_ptr<Transfer> take_transfer(bool reply) {
    auto transfer = std::move(transfers_[reply].front());
    transfers_[reply].pop_front();
    transfer_count_[reply].store(transfers_[reply].size());
    return transfer;
  }
  // It stays the first one.
  void put_back_transfer(bool reply, std::unique_ptr<Transfer> transfer) {
    transfers_[reply].push_front(std::move(transfer));
    transfer_count_[reply].store(transfers_[reply].size());
  }

 private:
  std::deque<ShmRemote*> rings_;
  std::deque<Task> tasks_;
  Handful* hand_ = nullptr;
  std::deque<std::unique_ptr<Transfer>> transfers_[2];
  // Side by side: threads look at all of them again and again.
  std::atomic<std::size_t> ring_count_{0};
  std::atomic<std::size_t> task_count_{0};
  std::atomic<std::size_t> transfer_count_[2] = {};
};

// What has its turn although letters come without a pause. Under the endpoint's mutex.
class Pace {
 public:
  void count_letters(int letters) { since_slice_ += static_cast<unsigned>(letters); }
  // The last one is large, and none that waits for slices.
  void discount_letter() {
    if (since_slice_ != 0) --since_slice_;
  }
  // Large ones get on by a slice after so many letters, however many there are.
  bool is_time_for_letters() const { return since_slice_ < kLettersPerSlice; }
  bool letters_came() const { return since_slice_ != 0; }
  // How much of a large letter may be copied, until others have their turn.
  std::size_t begin_slice() { return std::exchange(since_slice_, 0) != 0 ? kSmallSlice : kSlice; }
  // Counts a poll. A clock costs as much as a letter.
  bool is_time_for_timers() {
    if (++since_timers_ < kPollsPerTimers) return false;
    since_timers_ = 0;
    return true;
  }

 private:
  static constexpr unsigned kLettersPerSlice = 16;
  static constexpr unsigned kPollsPerTimers = 16;
  static constexpr std::size_t kSlice = std::size_t{1} << 20;
  static constexpr std::size_t kSmallSlice = std::size_t{256} << 10;  // while letters come, too

  unsigned since_slice_ = 0;   // letters
  unsigned since_timers_ = 0;  // polls
};

}  // namespace convoy::shm
