#include "launch/writer.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <set>

#include "base/loop.h"
#include "base/thread.h"
#include "os/socket.h"

namespace convoy::launch {

int write_fully(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(n));
    } else if (errno == EAGAIN) {
      // Somebody made it non-blocking. Its reader decides how long this takes.
      wait_ready(fd, POLLOUT, Deadline::never());
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

Writer::Writer(const std::string& name, Events events) : state_(std::make_shared<State>()) {
  state_->queue.lock()->events = std::move(events);
  thread_ = start_thread([name, state = state_] {
    set_thread_name(name);
    run(state);
  });
}

Writer::~Writer() {
  state_->queue.lock()->closed = true;
  state_->queue.notify();
  if (thread_.joinable()) thread_.join();
}

void Writer::write(int fd, std::string bytes) {
  if (bytes.empty()) return;
  state_->queued.fetch_add(bytes.size(), std::memory_order_relaxed);
  state_->queue.lock()->items.push_back({fd, std::move(bytes)});
  state_->queue.notify();
}

void Writer::abandon() {
  {
    auto queue = state_->queue.lock();
    queue->items.clear();
    queue->closed = true;
    queue->events = {};
  }
  state_->queue.notify();
  if (thread_.joinable()) thread_.detach();
}

void Writer::run(const std::shared_ptr<State>& state) {
  std::set<int> broken;
  for (;;) {
    Item item;
    {
      auto queue = state->queue.lock();
      queue.wait(Deadline::never(), [&] { return queue->closed || !queue->items.empty(); });
      if (queue->items.empty()) return;
      item = std::move(queue->items.front());
      queue->items.pop_front();
    }
    const int error = broken.contains(item.fd) ? 0 : write_fully(item.fd, item.bytes);
    state->queued.fetch_sub(item.bytes.size(), std::memory_order_relaxed);
    // The events are called without the lock; abandon() may have taken them away meanwhile.
    const Events events = state->queue.lock()->events;
    if (error != 0) {
      broken.insert(item.fd);
      if (events.failed) events.failed(item.fd, error);
    }
    if (events.progress) events.progress();
  }
}

}  // namespace convoy::launch
