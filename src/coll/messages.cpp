#include "coll/messages.h"

namespace convoy::coll {

void Callbacks::add(Transfer& ended) {
  if (ended.callback) ready_.emplace_back(std::move(ended.callback), ended.error);
}

void Callbacks::run(Lock& lock) {
  while (!ready_.empty()) {
    auto ready = std::exchange(ready_, {});
    lock.unlock();
    for (auto& [callback, error] : ready) callback(error);
    lock.lock();
  }
}

void end_thread(std::thread& thread) {
  if (!thread.joinable()) return;
  if (thread.get_id() == std::this_thread::get_id()) {
    thread.detach();
  } else {
    thread.join();
  }
}

}  // namespace convoy::coll
