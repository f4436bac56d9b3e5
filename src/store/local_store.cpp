#include <unistd.h>

#include <condition_variable>
#include <map>
#include <optional>
#include <utility>

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
    if (::getpid() != owner_) {
      fail(ErrorKind::kUnsupported,
           "store: an in-process store is not shared with a forked child; use a server");
    }
    Call call;
    auto state = state_.lock();
    do {
      request.id = ++state->last_id;
    } while (state->calls.contains(request.id));
    const auto place = state->calls.emplace(request.id, &call).first;
    const auto unregister = [&](Call*) { state->calls.erase(place); };
    const std::unique_ptr<Call, decltype(unregister)> registration(&call, unregister);
    state->table.handle(kOnlyClient, std::move(request), Deadline::Clock::now());
    while (!call.reply) {
      const auto replied = [&] { return call.reply.has_value(); };
      if (!state.wait(call.wake, deadline, replied)) state->table.expire(Deadline::Clock::now());
    }
    return checked_reply(std::move(*call.reply));
  }

 private:
  // Lives on its caller's stack, under the lock. Each has its own condition: a change wakes only
  // those whom it concerns.
  struct Call {
    std::optional<StoreMessage> reply;
    std::condition_variable wake;
  };
  struct State {
    std::map<std::uint32_t, Call*> calls;
    std::uint32_t last_id = 0;
    StoreTable table{limits(), [this](StoreTable::ClientId, StoreReply reply) {
                       Call& call = *calls.at(reply.message.id);
                       call.reply = std::move(reply).to_message();
                       call.wake.notify_one();
                     }};

    static StoreLimits limits() {
      StoreLimits limits;
      limits.waiting_per_client = std::size_t{1} << 20;  // all threads are one client here
      return limits;
    }
  };

  const pid_t owner_ = ::getpid();
  Guarded<State> state_;
};

}  // namespace

std::shared_ptr<Store> make_local_store() { return std::make_shared<LocalStore>(); }

}  // namespace convoy
