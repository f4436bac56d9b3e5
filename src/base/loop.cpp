#include "base/loop.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <exception>
#include <iterator>
#include <memory>
#include <utility>

#include "base/error.h"
#include "base/thread.h"

namespace convoy {
namespace {

constexpr Loop::WatchId kWakeId = 0;

void control(int epoll, int operation, int fd, std::uint32_t events, std::uint64_t id) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  if (epoll_ctl(epoll, operation, fd, &event) < 0) fail_errno("epoll_ctl on descriptor ", fd);
}

}  // namespace

Loop::Loop() : epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!epoll_ || !wake_) fail_errno("making an event loop");
  control(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), EPOLLIN, kWakeId);
}

void Loop::wake() {
  const std::uint64_t one = 1;
  // Fails only when the counter is full, and then the loop is awake anyway.
  [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof one);
}

void Loop::post(Callback function) {
  auto inbox = inbox_.lock();
  inbox->functions.push_back(std::move(function));
  const bool first = inbox->functions.size() == 1;
  inbox.unlock();
  if (first) wake();  // else somebody has, and the loop has not come to take them yet
}

void Loop::stop() {
  inbox_.lock()->stop = true;
  wake();
}

Loop::WatchId Loop::watch(int fd, std::uint32_t events, IoCallback callback) {
  const WatchId id = next_id_++;
  control(epoll_.get(), EPOLL_CTL_ADD, fd, events, id);
  watches_.emplace(id, std::make_shared<Watch>(Watch{fd, std::move(callback)}));
  return id;
}

void Loop::modify(WatchId id, std::uint32_t events) {
  const auto found = watches_.find(id);
  CONVOY_CHECK(found != watches_.end(), "there is no watch ", id);
  control(epoll_.get(), EPOLL_CTL_MOD, found->second->fd, events, id);
}

void Loop::unwatch(WatchId id) {
  const auto found = watches_.find(id);
  if (found == watches_.end()) return;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, found->second->fd, nullptr);
  watches_.erase(found);
}

Loop::TimerId Loop::call_at(Deadline::Clock::time_point when, Callback callback) {
  const TimerId id = next_id_++;
  timers_.emplace(std::pair(when, id), std::move(callback));
  due_.emplace(id, when);
  return id;
}

void Loop::cancel(TimerId id) {
  const auto found = due_.find(id);
  if (found == due_.end()) return;
  timers_.erase({found->second, id});
  due_.erase(found);
}

void Loop::run_timers_on_loop() {
  CONVOY_DCHECK(in_loop());
  const auto now = Deadline::Clock::now();
  // A timer set meanwhile waits for the next round: one that sets itself anew for now or earlier
  // would keep descriptors and posts from their turn.
  const TimerId first_new = next_id_;
  for (;;) {
    const auto due = std::find_if(timers_.begin(), timers_.end(), [&](const auto& timer) {
      return timer.first.first > now || timer.first.second < first_new;
    });
    if (due == timers_.end() || due->first.first > now) return;
    const auto node = timers_.extract(due);
    due_.erase(node.key().second);
    node.mapped()();
  }
}

void Loop::run_batch_on_loop(std::vector<Callback> functions) {
  CONVOY_DCHECK(in_loop());
  auto next = functions.begin();
  try {
    while (next != functions.end()) (*next++)();
  } catch (...) {
    auto inbox = inbox_.lock();  // what did not get its turn keeps it
    inbox->functions.insert(inbox->functions.begin(), std::make_move_iterator(next),
                            std::make_move_iterator(functions.end()));
    inbox.unlock();
    wake();
    throw;
  }
}

bool Loop::run_inbox_on_loop() {
  CONVOY_DCHECK(in_loop());
  std::vector<Callback> functions;
  bool stop = false;
  {
    auto inbox = inbox_.lock();
    functions.swap(inbox->functions);
    stop = inbox->stop;
  }
  run_batch_on_loop(std::move(functions));
  return !stop;
}

void Loop::handle_on_loop(std::uint64_t id, std::uint32_t events) {
  CONVOY_DCHECK(in_loop());
  if (id == kWakeId) {
    std::uint64_t drained = 0;
    [[maybe_unused]] const auto got = ::read(wake_.get(), &drained, sizeof drained);
    return;
  }
  const auto found = watches_.find(id);
  if (found == watches_.end()) return;  // removed by an earlier handler of this batch
  const auto watch = found->second;     // keeps the callback alive while it removes itself
  watch->callback(events);
}

// Of a thread in the loop, also when a handler throws.
class Loop::Presence {
 public:
  explicit Presence(Loop& loop) : loop_(loop) {
    std::thread::id nobody;
    here_ = loop.thread_.compare_exchange_strong(nobody, std::this_thread::get_id(),
                                                 std::memory_order_acquire);
  }
  Presence(const Presence&) = delete;
  Presence& operator=(const Presence&) = delete;
  ~Presence() {
    if (here_) loop_.thread_.store({}, std::memory_order_release);
  }
  explicit operator bool() const { return here_; }

 private:
  Loop& loop_;
  bool here_;
};

void Loop::wait_on_loop(const Deadline& deadline) {
  CONVOY_DCHECK(in_loop());
  const auto first =
      timers_.empty() ? Deadline::never() : Deadline::at(timers_.begin()->first.first);
  std::array<epoll_event, 64> events;
  const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                               std::min(first, deadline).poll_timeout_ms());
  if (count < 0 && errno != EINTR) fail_errno("epoll_wait");
  for (int i = 0; i < count; ++i) {
    const auto& event = events[static_cast<std::size_t>(i)];
    handle_on_loop(event.data.u64, event.events);
  }
  run_timers_on_loop();
}

void Loop::run() {
  const Presence presence(*this);
  CONVOY_CHECK(presence, "another thread is in this loop");
  while (run_inbox_on_loop()) wait_on_loop(Deadline::never());
  inbox_.lock()->stop = false;
}

bool Loop::run_once(const Deadline& deadline) {
  const Presence presence(*this);
  if (!presence) return false;
  const bool idle = inbox_.lock()->functions.empty();
  wait_on_loop(idle ? deadline : Deadline::at({}));
  run_inbox_on_loop();
  return true;
}

LoopThread::LoopThread(const std::string& name)
    : thread_(start_thread<std::jthread>([this, name] {
        set_thread_name(name);
        loop_.run();
      })) {}

// join() throws only if a loop ends itself: a bug of ours that must not go on.
LoopThread::~LoopThread() { join(); }  // NOLINT(bugprone-exception-escape)

void LoopThread::join() {
  if (!thread_.joinable()) return;
  if (::getpid() != owner_) {  // a forked child has this object and not the thread
    thread_.detach();
    return;
  }
  CONVOY_CHECK(!loop_.in_loop(), "a loop cannot join itself");
  {
    auto ended = ended_.lock();
    *ended = true;
    loop_.stop();
  }
  thread_.join();
}

void LoopThread::call(const std::function<void()>& function) {
  if (loop_.in_loop()) return function();
  struct Result {
    bool there = false;
    std::exception_ptr error;
  };
  // Shared: the caller may be gone while the loop's thread is still inside notify(). An exception
  // is handed over whole: what it points to is counted inside libstdc++, where ThreadSanitizer does
  // not see that two threads let go of it in order.
  const auto result = std::make_shared<Guarded<Result>>();
  {
    // With the lock held a post comes before the stop of join(), and is run.
    auto ended = ended_.lock();
    CONVOY_CHECK(!*ended, "this loop's thread has ended");
    loop_.post([result, &function] {
      std::exception_ptr error;
      try {
        function();
      } catch (...) {
        error = std::current_exception();
      }
      *result->lock() = {true, std::move(error)};
      result->notify();
    });
  }
  auto state = result->lock();
  state.wait(Deadline::never(), [&] { return state->there; });
  if (state->error) std::rethrow_exception(std::exchange(state->error, nullptr));
}

void set_thread_name(const std::string& name) {
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
}

}  // namespace convoy
