#include "work_pool.h"

#include <unistd.h>

#include <thread>
#include <utility>

namespace convoy::python {

// Guarded by the pool's mutex.
struct WorkPool::Task {
  int calls = 0;  // under way
  bool over = false;
  bool passed_over = false;  // it takes long

  bool counts() const { return calls == 0 && !over && !passed_over; }
};

struct WorkPool::Waiting::State {
  std::shared_ptr<WorkPool> pool;
  std::shared_ptr<Task> task;
};

namespace {

// The task of this thread.
struct Here {
  WorkPool* pool = nullptr;
  std::shared_ptr<void> task;
};
thread_local Here here;

}  // namespace

std::shared_ptr<WorkPool> WorkPool::make(int size, std::chrono::milliseconds stall) {
  return std::shared_ptr<WorkPool>(new WorkPool(size, stall));
}

WorkPool::WorkPool(int size, std::chrono::milliseconds stall)
    : home_(::getpid()), size_(size), stall_(stall) {}

bool WorkPool::is_at_home() const { return ::getpid() == home_; }

void WorkPool::start() {
  Lock lock(mutex_);
  started_ = true;
  dispatch(lock);
}

bool WorkPool::submit(Work work) {
  Lock lock(mutex_);
  if (stopping_) {
    lock.unlock();  // what it holds goes without the lock
    return false;
  }
  queue_.push_back(std::move(work));
  dispatch(lock);
  return true;
}

// As many threads as may run something. May let go of the lock.
void WorkPool::dispatch(Lock& lock) {
  if (!started_ || queue_.empty()) return;
  if (running_ < size_) {
    if (idle_ > 0) {
      lock.unlock();  // so that whoever wakes up finds it free
      work_came_.notify_one();
      return;
    }
    ++threads_;
    ++idle_;  // until it takes something
    std::thread([self = shared_from_this()] { self->work(); }).detach();
    return;
  }
  if (watching_) {
    if (std::exchange(watch_sleeps_, false)) watch_.notify_one();
    return;
  }
  watching_ = true;
  ++threads_;
  std::thread([self = shared_from_this()] { self->watch(); }).detach();
}

void WorkPool::work() {
  Lock lock(mutex_);
  while (true) {
    work_came_.wait(lock, [&] { return stopping_ || (!queue_.empty() && running_ < size_); });
    --idle_;
    if (queue_.empty()) break;
    run(lock);
    ++idle_;
    // The first is this thread's.
    if (queue_.size() > 1 && idle_ > 1 && running_ + 1 < size_) work_came_.notify_one();
  }
  if (--threads_ == 0) ended_.notify_all();
}

void WorkPool::run(Lock& lock) {
  const auto task = std::make_shared<Task>();
  const auto place = tasks_.insert(tasks_.end(), task);
  ++running_;
  ++changes_;
  {
    Work work = std::move(queue_.front());
    queue_.pop_front();
    dispatch(lock);  // the next one, perhaps
    if (lock.owns_lock()) lock.unlock();
    here = {this, task};
    work();
    work = nullptr;
    here = {};
  }
  lock.lock();
  if (task->counts()) --running_;
  task->over = true;
  tasks_.erase(place);
  ++changes_;
}

void WorkPool::watch() {
  Lock lock(mutex_);
  while (!stopping_) {
    while (!stopping_ && queue_.empty()) {
      watch_sleeps_ = true;
      watch_.wait(lock);
    }
    watch_sleeps_ = false;
    const std::uint64_t before = changes_;
    watch_.wait_for(lock, stall_, [&] { return stopping_; });
    if (stopping_ || queue_.empty() || changes_ != before) continue;
    pass_over_longest();
    dispatch(lock);
    if (!lock.owns_lock()) lock.lock();
  }
  if (--threads_ == 0) ended_.notify_all();
}

void WorkPool::pass_over_longest() {
  for (const auto& task : tasks_) {
    if (!task->counts()) continue;
    task->passed_over = true;
    --running_;
    return;
  }
}

bool WorkPool::stop(Queued queued, const Deadline& deadline) {
  if (!is_at_home()) return true;
  std::deque<Work> dropped;
  Lock lock(mutex_);
  stopping_ = true;
  if (queued == Queued::kDrop || threads_ == 0) dropped.swap(queue_);
  work_came_.notify_all();
  watch_.notify_all();
  lock.unlock();
  if (queued == Queued::kRun) {
    for (const Work& work : dropped) work();
  }
  dropped.clear();
  lock.lock();
  const auto all = [&] { return threads_ == (here.pool == this ? 1 : 0); };
  if (deadline.is_never()) {
    ended_.wait(lock, all);
    return true;
  }
  return ended_.wait_until(lock, deadline.when(), all);
}

WorkPool::Stats WorkPool::stats() const {
  const Lock lock(mutex_);
  return {size_, running_ < size_ ? size_ - running_ : 0};
}

void WorkPool::began_to_wait(Task& task) {
  Lock lock(mutex_);
  const bool counted = task.counts();
  ++task.calls;
  if (!counted) return;
  --running_;
  dispatch(lock);
}

void WorkPool::waits_no_more(Task& task) {
  const Lock lock(mutex_);
  --task.calls;
  if (task.counts()) ++running_;
}

WorkPool::Waiting::Waiting() {
  if (!here.pool) return;
  state_ = std::make_shared<State>(
      State{here.pool->shared_from_this(), std::static_pointer_cast<Task>(here.task)});
  state_->pool->began_to_wait(*state_->task);
}

void WorkPool::Waiting::ended() const {
  if (state_) state_->pool->waits_no_more(*state_->task);
}

}  // namespace convoy::python
