#include <map>

#include "base/error.h"
#include "base/guarded.h"
#include "store/request_store.h"
#include "store/table.h"

namespace convoy {
namespace {

constexpr StoreTable::ClientId kOnlyClient = 1;

class LocalStore final : public RequestStore {
 protected:
  StoreMessage exchange(StoreMessage request, const Deadline& deadline) override {
    auto state = state_.lock();
    const std::uint32_t id = request.id = state->next_id++;
    state->table.handle(kOnlyClient, std::move(request), Deadline::Clock::now());
    state_.notify();
    while (!state->replies.contains(id)) {
      if (state.wait(deadline, [&] { return state->replies.contains(id); })) break;
      state->table.expire(Deadline::Clock::now());
    }
    return checked_reply(std::move(state->replies.extract(id).mapped()));
  }

 private:
  struct State {
    std::map<std::uint32_t, StoreMessage> replies;  // not yet fetched by their callers
    std::uint32_t next_id = 1;
    StoreTable table{limits(), [this](StoreTable::ClientId, StoreMessage reply) {
                       const auto id = reply.id;
                       replies[id] = std::move(reply);
                     }};

    static StoreLimits limits() {
      StoreLimits limits;
      limits.waiting_per_client = std::size_t{1} << 20;  // all threads are one client here
      return limits;
    }
  };

  Guarded<State> state_;
};

}  // namespace

std::shared_ptr<Store> make_local_store() { return std::make_shared<LocalStore>(); }

}  // namespace convoy
