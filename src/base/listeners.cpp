#include "base/listeners.h"

#include <algorithm>

#include "base/error.h"
#include "base/log.h"

namespace convoy {

EventHandle Listeners::add(EventCallback callback) {
  if (!callback) fail(ErrorKind::kInvalidArgument, "on_event: the callback is empty");
  auto listener = std::make_shared<EventListener>(weak_from_this(), std::move(callback));
  auto all = all_.lock();
  all->push_back(listener);
  count_.store(all->size(), std::memory_order_release);
  return EventHandle(std::move(listener));
}

void Listeners::tell(const Event& event) {
  const auto now = *all_.lock();  // a callback may add and remove
  for (const auto& listener : now) listener->call(event);
}

void Listeners::drop(const EventListener& listener) {
  auto all = all_.lock();
  std::erase_if(*all, [&](const auto& one) { return one.get() == &listener; });
  count_.store(all->size(), std::memory_order_release);
}

void EventListener::call(const Event& event) {
  const auto me = std::this_thread::get_id();
  {
    auto state = state_.lock();
    if (state->removed) return;
    state->callers.push_back(me);
  }
  try {
    callback_(event);
  } catch (const std::exception& thrown) {
    log_warn("a function given to on_event threw: ", thrown.what());
  } catch (...) {
    log_warn("a function given to on_event threw something that is not a std::exception");
  }
  {
    auto state = state_.lock();
    state->callers.erase(std::find(state->callers.begin(), state->callers.end(), me));
  }
  state_.notify();
}

void EventListener::remove() noexcept {
  if (::getpid() != process_) return;  // nobody calls it there, and its locks may be held for ever
  if (const auto owner = owner_.lock()) owner->drop(*this);
  const auto me = std::this_thread::get_id();
  auto state = state_.lock();
  state->removed = true;
  // Not for this thread's own call, which cannot end before this does.
  state.wait(Deadline::never(), [&] {
    return std::all_of(state->callers.begin(), state->callers.end(),
                       [&](const auto& caller) { return caller == me; });
  });
}

EventHandle& EventHandle::operator=(EventHandle&& other) noexcept {
  if (this != &other) {
    remove();
    listener_ = std::move(other.listener_);
  }
  return *this;
}

void EventHandle::remove() noexcept {
  if (listener_) listener_->remove();
  listener_.reset();
}

}  // namespace convoy
