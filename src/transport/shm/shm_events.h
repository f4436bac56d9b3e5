#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/guarded.h"
#include "base/unique_fd.h"
#include "transport/endpoint.h"
#include "transport/shm/peer.h"

namespace convoy::shm {

class ShmRemote;

// The `on_sent` of letters that are done with, and whether they were received.
using SentList = std::vector<std::pair<transport::Sent, bool>>;

// Something that happened on the watch thread, or while sending.
struct Event {
  enum class Type { kDialed, kNote, kLost, kCut, kSent } type;
  std::shared_ptr<Peer> peer = nullptr;
  std::string text = {};  // kDialed: the other's address; kCut: what it did, if it did anything
  Frame frame = {};
  UniqueFd fd = {};
  ShmRemote* remote = nullptr;  // kCut, kSent
  SentList sent = {};
};

// Events that nobody has looked at yet. Any thread adds, whatever locks it holds; who holds the
// endpoint's mutex takes.
class EventList {
 public:
  void add(Event event) noexcept {
    list_.lock()->push_back(std::move(event));
    any_.store(true);
  }
  // Without a lock. An event that was added is seen, or is about to be rung for.
  bool any(std::memory_order order = std::memory_order_seq_cst) const noexcept {
    return any_.load(order);
  }
  std::vector<Event> take() {
    any_.store(false);  // before the look: what comes after it is announced again
    return std::exchange(*list_.lock(), {});
  }
  // For the end of the endpoint, which takes no more of them.
  auto lock() { return list_.lock(); }

 private:
  std::atomic<bool> any_{false};
  Guarded<std::vector<Event>> list_;
};

}  // namespace convoy::shm
