#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "agent/request.h"
#include "base/guarded.h"

namespace convoy::agent {

// Requests that were answered and that nobody refers to, for the next ones: serving a call
// allocates none. Any thread gives them back; one of them is there without a lock, for callers that
// wait for each answer. They are deleted with this, after all that could give one back.
class SpareRequests {
 public:
  SpareRequests() = default;
  SpareRequests(const SpareRequests&) = delete;
  SpareRequests& operator=(const SpareRequests&) = delete;
  ~SpareRequests();

  // Neither cancelled nor answered, with one reference. A new one, if there is none.
  Request* take(const std::shared_ptr<AgentLife>& life) {
    Request* request = one_.exchange(nullptr, std::memory_order_acquire);
    if (!request) request = take_more(life);
    request->references_.store(1, std::memory_order_relaxed);
    request->cancelled_.store(false, std::memory_order_relaxed);
    request->answered_.store(false, std::memory_order_relaxed);
    return request;
  }
  // Deletes it if there are enough.
  void give(Request* request) noexcept {
    Request* none = nullptr;
    if (!one_.compare_exchange_strong(none, request, std::memory_order_release,
                                      std::memory_order_relaxed)) {
      give_more(request);
    }
  }

 private:
  Request* take_more(const std::shared_ptr<AgentLife>& life);
  void give_more(Request* request) noexcept;

  std::atomic<Request*> one_{nullptr};
  Guarded<std::vector<Request*>> more_;
};

}  // namespace convoy::agent
