#include "store/socket_store.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/guarded.h"
#include "os/fork_guard.h"
#include "store/request_store.h"

namespace convoy {
namespace {

// How long after a request's deadline the server's own "timed out, missing: ..." may take to come.
constexpr auto kAnswerGrace = std::chrono::seconds(2);

constexpr FrameLimits kReplyLimits{.body_bytes = UINT32_MAX, .parts = SIZE_MAX};

// Counted from now if the deadline has passed already: the server may well have the answer.
Deadline with_grace(const Deadline& deadline) {
  const auto from = std::max(deadline.when(), Deadline::Clock::now());
  if (from >= Deadline::Clock::time_point::max() - kAnswerGrace) return Deadline::never();
  return Deadline::at(from + kAnswerGrace);
}

// Any number of threads may have calls under way. The store has no thread of its own: one of the
// callers that wait, the leader, moves bytes in both directions for all of them; when it has its
// own reply it hands the task on. Requests that the socket does not take at once are kept here, so
// a caller that gives up leaves the stream whole.
class SocketStore final : public RequestStore {
 public:
  explicit SocketStore(Socket socket)
      : socket_(std::move(socket)),
        nudge_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        generation_(fork_generation()) {
    if (!nudge_) fail_errno("making a store client");
  }

 protected:
  StoreMessage exchange(StoreMessage request, const Deadline& deadline) override {
    if (fork_generation() != generation_) {
      fail(ErrorKind::kUnsupported,
           "store: this connection belongs to the parent process; a forked child cannot use it");
    }
    const Deadline answer_by = with_grace(deadline);
    Call call;
    const Registration registration(*this, call);
    request.id = call.id;
    std::string bytes = encode(request);
    request.parts.resize(std::min<std::size_t>(request.parts.size(), 1));  // a name for messages

    auto state = state_.lock();
    post_locked(*state, {call.id, std::move(bytes)});
    call.waiting = true;
    while (!call.reply) {
      if (state->broken) throw *state->broken;
      if (answer_by.expired()) fail_unanswered(request);
      if (!state->leader) state->leader = &call;
      if (state->leader == &call) {
        const bool sending = !state->outbox.empty();
        state.unlock();
        lead(sending, answer_by);
        state.relock();
      } else {
        state.wait(call.wake, answer_by,
                   [&] { return call.reply || state->broken || state->leader == &call; });
      }
    }
    return checked_reply(std::move(*call.reply));
  }

 private:
  // Lives on its caller's stack; all but `id` under the lock. `wake` is notified under the lock, so
  // that the call cannot end meanwhile.
  struct Call {
    std::uint32_t id = 0;
    bool waiting = false;  // may be made leader
    std::optional<StoreMessage> reply;
    std::condition_variable wake;
  };
  struct Outgoing {
    std::uint32_t id;
    std::string bytes;
  };
  struct State {
    std::map<std::uint32_t, Call*> calls;
    Call* leader = nullptr;
    std::uint32_t last_id = kConnectionId;
    std::deque<Outgoing> outbox;
    std::size_t sent_of_first = 0;
    std::optional<Error> broken;  // sticks: the connection is of no use any more
  };

  class Registration {
   public:
    Registration(SocketStore& store, Call& call) : store_(store), call_(call) {
      auto state = store_.state_.lock();
      if (state->broken) throw *state->broken;
      do {
        call_.id = ++state->last_id;
      } while (call_.id == kConnectionId || state->calls.contains(call_.id));
      state->calls.emplace(call_.id, &call_);
    }
    ~Registration() { store_.leave(call_); }
    Registration(const Registration&) = delete;
    Registration& operator=(const Registration&) = delete;

   private:
    SocketStore& store_;
    Call& call_;
  };

  void leave(Call& call) {
    auto state = state_.lock();
    state->calls.erase(call.id);
    if (!call.reply) withdraw_locked(*state, call.id);
    if (state->leader != &call) return;
    const auto next = std::find_if(state->calls.begin(), state->calls.end(), [](const auto& other) {
      return other.second->waiting && !other.second->reply;
    });
    state->leader = next == state->calls.end() ? nullptr : next->second;
    if (state->leader) state->leader->wake.notify_one();
  }

  // Nobody waits for this request any more: not sent, unless a part of it is out already.
  static void withdraw_locked(State& state, std::uint32_t id) {
    const auto begun = state.sent_of_first > 0 ? 1 : 0;
    const auto found = std::find_if(state.outbox.begin() + begun, state.outbox.end(),
                                    [id](const auto& request) { return request.id == id; });
    if (found != state.outbox.end()) state.outbox.erase(found);
  }

  void post_locked(State& state, Outgoing request) {
    state.outbox.push_back(std::move(request));
    if (state.outbox.size() == 1) flush_locked(state);
    if (state.outbox.empty() || !state.leader) return;
    // The leader may sleep without waiting for room to send.
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(nudge_.get(), &one, sizeof one);
  }

  void flush_locked(State& state) {
    try {
      while (!state.outbox.empty()) {
        const auto& first = state.outbox.front().bytes;
        const auto sent =
            socket_.try_send(std::as_bytes(std::span(first)).subspan(state.sent_of_first));
        if (sent && *sent == 0) return;
        // If the server has closed, why may stand in what there is to read: go on to that.
        state.sent_of_first = sent ? state.sent_of_first + *sent : first.size();
        if (state.sent_of_first < first.size()) continue;
        state.outbox.pop_front();
        state.sent_of_first = 0;
      }
    } catch (const Error& error) {
      break_locked(state, error);
    }
  }

  // Waits for the socket once and moves what can be moved. Only the leader.
  void lead(bool sending, const Deadline& deadline) {
    try {
      std::array<pollfd, 2> items{{{socket_.fd(), POLLIN, 0}, {nudge_.get(), POLLIN, 0}}};
      if (sending) items[0].events |= POLLOUT;
      const int ready = ::poll(items.data(), items.size(), deadline.poll_timeout_ms());
      if (ready < 0 && errno != EINTR) fail_errno("waiting for the store");
      if (ready <= 0) return;
      std::uint64_t drained = 0;
      if (items[1].revents) {
        [[maybe_unused]] const auto got = ::read(nudge_.get(), &drained, sizeof drained);
      }
      if (items[0].revents & POLLOUT) flush_locked(*state_.lock());
      if (items[0].revents & ~POLLOUT) receive();
    } catch (const Error& error) {
      break_locked(*state_.lock(), error);
    }
  }

  void receive() {
    const auto got = socket_.try_receive(read_buffer_);
    if (!got) {
      fail(ErrorKind::kPeerLost,
           "store: the server closed the connection; read the launcher's (or rank 0's) log");
    }
    decoder_.feed(std::span(read_buffer_).first(*got));
    while (auto reply = decoder_.next()) {
      if (reply->id == kConnectionId) checked_reply(std::move(*reply));
      auto state = state_.lock();
      const auto found = state->calls.find(reply->id);
      if (found == state->calls.end()) continue;  // its caller has given up
      found->second->reply = std::move(*reply);
      found->second->wake.notify_one();
    }
  }

  static void break_locked(State& state, const Error& error) {
    if (!state.broken) state.broken = error;
    for (const auto& [id, call] : state.calls) call->wake.notify_one();
  }

  [[noreturn]] static void fail_unanswered(const StoreMessage& request) {
    fail(ErrorKind::kTimeout, "store: ", to_string(static_cast<StoreOp>(request.code)), " ",
         request.parts.empty() ? "" : printable(request.parts[0]),
         ": the server did not answer by the deadline; it is stopped or overloaded");
  }

  Socket socket_;
  const UniqueFd nudge_;  // wakes the leader
  const unsigned generation_;
  Guarded<State> state_;
  // Used by the leader.
  StoreDecoder decoder_{kReplyLimits};
  std::array<std::byte, std::size_t{64} << 10> read_buffer_;
};

}  // namespace

std::shared_ptr<Store> make_socket_store(Socket socket) {
  return std::make_shared<SocketStore>(std::move(socket));
}

std::shared_ptr<Store> connect_store(const std::string& socket_path, const Deadline& deadline) {
  Socket socket = Socket::connect(socket_path, deadline);
  socket.require_same_user();
  return make_socket_store(std::move(socket));
}

}  // namespace convoy
