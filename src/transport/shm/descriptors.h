#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>

#include "base/guarded.h"
#include "base/unique_fd.h"
#include "convoy/deadline.h"

namespace convoy::shm {

// What a thread waits for that sleeps on epoll: descriptors, and an eventfd by which others wake it
// (the waker). All methods may be called from any thread; several may wait at once.
class Descriptors {
 public:
  using Ready = std::function<void(std::uint32_t events)>;
  using Id = std::uint64_t;

  Descriptors();

  // Written to by whoever wakes; passed to other processes.
  int waker() const { return waker_.get(); }

  // `ready` is to be called when `fd` has one of `events` (EPOLLIN, ...; errors and hang-ups
  // always), again and again, but not while it runs. The descriptor stays open until remove().
  Id add(int fd, std::uint32_t events, Ready ready);
  // False: it was not there, or runs just now, for the last time.
  bool remove(Id id);

  // Until something is there, or somebody has written to the waker, or the deadline. What was
  // written before this returns will not end the next wait.
  void wait(const Deadline& deadline);
  // Some descriptor's turn has come.
  bool any() const noexcept { return count_.load() != 0; }
  // Calls one. False: there was none.
  bool run_one();

 private:
  struct Watched {
    int fd;
    std::uint32_t events;
    Ready ready;
    bool runs = false;
  };
  struct State {
    std::map<Id, std::shared_ptr<Watched>> watched;
    std::deque<std::pair<Id, std::uint32_t>> queue;
    Id next = 1;
  };

  UniqueFd epoll_;
  UniqueFd waker_;
  Guarded<State> state_;
  std::atomic<std::size_t> count_{0};  // of State::queue
};

// Wakes who waits there. Keeps errno.
void write_waker(int waker) noexcept;
// What another process calls its waker is one.
bool is_waker(int descriptor) noexcept;

}  // namespace convoy::shm
