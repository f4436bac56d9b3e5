#include "agent/executor.h"

#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/thread.h"

namespace convoy::agent {
namespace {

// How long a thread above the size stays without work.
constexpr std::chrono::seconds kIdleTime(2);

thread_local Executor* executor_here = nullptr;
thread_local int executor_waits = 0;

}  // namespace

// Marks the thread as one that runs a task.
class Executor::Here {
 public:
  explicit Here(Executor* executor) : before_(std::exchange(executor_here, executor)) {}
  Here(const Here&) = delete;
  Here& operator=(const Here&) = delete;
  ~Here() { executor_here = before_; }

 private:
  Executor* const before_;
};

Executor::Executor(int size, Starter starter) : size_(size), starter_(std::move(starter)) {
  if (size < 1) fail(ErrorKind::kInvalidArgument, "a pool of threads must have >= 1, got ", size);
}

Executor::~Executor() { stop(); }

void Executor::submit(Task& task) noexcept {
  std::unique_lock lock(mutex_);
  if (stopping_) {
    lock.unlock();
    return task.discard();
  }
  task.next_ = nullptr;
  (last_ ? last_->next_ : first_) = &task;
  last_ = &task;
  ++queued_;
  dispatch(lock);
}

Task* Executor::pop() noexcept {
  Task* const task = first_;
  if (!task) return nullptr;
  first_ = task->next_;
  if (!first_) last_ = nullptr;
  --queued_;
  return task;
}

// Gets one more thread to work if there is something to do and a place to do it. May let go of the
// lock at its end.
void Executor::dispatch(Lock& lock) noexcept {
  if (!first_ || running_ >= size_) return;
  ++running_;
  if (idle_ > called_) {
    ++called_;
    work_came_.notify_one();
    return;
  }
  ++threads_;
  try {
    for (std::thread& thread : std::exchange(ended_, {})) thread.join();
    if (starter_) {
      starter_([this] { work(); });
    } else {
      std::thread thread = start_thread([this] { work(); });
      const auto id = thread.get_id();
      own_.emplace(id, std::move(thread));
    }
  } catch (const std::exception& error) {
    --running_;
    --threads_;
    if (running_ == 0 && idle_ == 0)
      return refuse_all(lock, Error(ErrorKind::kResource, error.what()));
    log_warn("rpc: a call waits until one of ", threads_, " threads is free: ", error.what());
  }
}

// Whoever waits may wait for one of these.
void Executor::refuse_all(Lock& lock, const Error& error) noexcept {
  Task* task = std::exchange(first_, nullptr);
  last_ = nullptr;
  queued_ = 0;
  lock.unlock();
  while (task) {
    Task* const next = task->next_;
    task->refuse(error);
    task = next;
  }
}

// A thread. It has a place in running_ when it begins, and whenever it takes a task.
void Executor::work() noexcept {
  if (!starter_) set_thread_name("convoy-rpc");
  std::unique_lock lock(mutex_);
  for (;;) {
    while (Task* const task = running_ <= size_ ? pop() : nullptr) {
      lock.unlock();
      {
        const Here here(this);
        task->run_task();
      }
      lock.lock();
    }
    --running_;
    if (stopping_ || starter_) break;
    ++idle_;
    const auto called = [this] { return called_ != 0 || stopping_; };
    const bool woken = work_came_.wait_for(lock, kIdleTime, called) || threads_ <= size_;
    if (woken && !called()) work_came_.wait(lock, called);
    --idle_;
    if (called_ == 0) break;  // it is too much, or all end
    --called_;
    if (stopping_) {
      --running_;
      break;
    }
  }
  --threads_;
  if (const auto own = own_.find(std::this_thread::get_id()); own != own_.end()) {
    ended_.push_back(std::move(own->second));
    own_.erase(own);
  }
  thread_ended_.notify_all();
}

bool Executor::try_enter() noexcept {
  const std::scoped_lock lock(mutex_);
  if (first_ || running_ >= size_ || stopping_) return false;
  ++running_;
  executor_here = this;
  return true;
}

void Executor::leave() noexcept {
  Lock lock(mutex_);
  executor_here = nullptr;
  --running_;
  if (stopping_) thread_ended_.notify_all();
  dispatch(lock);
}

void Executor::begin_waiting() noexcept {
  Lock lock(mutex_);
  --running_;
  ++waiting_;
  dispatch(lock);
}

void Executor::end_waiting() noexcept {
  const std::scoped_lock lock(mutex_);
  --waiting_;
  ++running_;
}

Executor::Waiting::Waiting() noexcept : executor_(executor_waits == 0 ? executor_here : nullptr) {
  if (!executor_) return;
  ++executor_waits;
  executor_->begin_waiting();
}

Executor::Waiting::~Waiting() {
  if (!executor_) return;
  --executor_waits;
  executor_->end_waiting();
}

bool Executor::is_here() const noexcept { return executor_here == this; }

bool Executor::is_waiting() noexcept { return executor_waits != 0; }

void Executor::stop() noexcept {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  Task* task = std::exchange(first_, nullptr);
  last_ = nullptr;
  queued_ = 0;
  lock.unlock();
  while (task) {
    Task* const next = task->next_;
    task->discard();
    task = next;
  }
  work_came_.notify_all();
  lock.lock();
  thread_ended_.wait(lock, [this] { return threads_ == 0 && running_ == 0 && waiting_ == 0; });
  for (std::thread& thread : std::exchange(ended_, {})) thread.join();
}

ExecutorStats Executor::stats() const {
  const std::scoped_lock lock(mutex_);
  return {size_, running_, waiting_, threads_, queued_};
}

}  // namespace convoy::agent
