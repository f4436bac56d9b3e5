#include "agent/spare_requests.h"

#include "agent/peer.h"

namespace convoy::agent {
namespace {

constexpr std::size_t kMostSpareRequests = 256;

}  // namespace

SpareRequests::~SpareRequests() {
  delete one_.load();
  auto more = more_.lock();
  for (Request* const request : *more) delete request;
}

Request* SpareRequests::take_more(const std::shared_ptr<AgentLife>& life) {
  {
    auto more = more_.lock();
    if (!more->empty()) {
      Request* const request = more->back();
      more->pop_back();
      return request;
    }
  }
  return new Request(life);
}

void SpareRequests::give_more(Request* request) noexcept {
  {
    auto more = more_.lock();
    if (more->size() < kMostSpareRequests) {
      more->push_back(request);
      return;
    }
  }
  delete request;
}

}  // namespace convoy::agent
