#include "store/server.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "base/log_limit.h"
#include "base/loop.h"
#include "os/socket.h"
#include "store/connection.h"
#include "store/protocol.h"
#include "store/table.h"

namespace convoy {
namespace {

// A client is not asked to do without this much, however many others there are.
constexpr std::size_t kSmallBytes = std::size_t{64} << 10;

// When accept fails because descriptors are used up, the queue stays readable: the loop must not
// run hot over it.
constexpr auto kAcceptPause = std::chrono::milliseconds(100);

FrameLimits request_limits(const StoreLimits& limits) {
  const std::size_t part = 4 + std::max(limits.key_bytes, limits.value_bytes);
  return {.body_bytes = std::max(3 * part, limits.keys_per_request * (4 + limits.key_bytes)),
          .parts = std::max<std::size_t>(3, limits.keys_per_request)};
}

std::size_t body_bytes(const StoreMessage& message) {
  std::size_t bytes = 0;
  for (const auto& part : message.parts) bytes += 4 + part.size();
  return bytes;
}

// Best effort: the peer may be anybody.
void say_why(Socket& socket, const Error& error) noexcept {
  try {
    const std::string bytes = encode(error_reply(kConnectionId, error.kind(), error.what()));
    socket.try_send(std::as_bytes(std::span(bytes)));
  } catch (const std::exception&) {
  }
}

}  // namespace

// All state belongs to the loop's thread; public methods go there with call().
class StoreServer::Impl {
 public:
  explicit Impl(const StoreLimits& limits)
      : limits_(limits), table_(limits, [this](StoreTable::ClientId client, StoreReply reply) {
          reply_on_loop(client, std::move(reply));
        }) {}

  ~Impl() { thread_.join(); }  // before the connections go: no handler may see them half destroyed

  UniqueFd connect() {
    auto [ours, theirs] = Socket::pair();
    thread_.call([&, socket = &ours] { add_client_on_loop(*socket); });
    return theirs.release();
  }

  std::string listen(const std::string& folder, const std::string& name) {
    std::string path;
    thread_.call([&] {
      if (listener_) {
        fail(ErrorKind::kInvalidArgument, "the store listens at ", listener_->path(), " already");
      }
      listener_.emplace(folder, name);
      path = listener_->path();
      watch_listener_on_loop();
    });
    return path;
  }

  void unlink() {
    thread_.call([&] {
      if (!listener_) return;
      accept_on_loop();  // who has connected by now is in
      thread_.loop().cancel(accept_timer_);
      thread_.loop().unwatch(listener_watch_);
      listener_.reset();
    });
  }

  void append(const std::string& key, const std::string& value) {
    thread_.call([&] {
      table_.handle(kServer,
                    {.code = static_cast<std::uint8_t>(StoreOp::kAppend), .parts = {key, value}},
                    Deadline::Clock::now());
      arm_timer_on_loop();
    });
  }

  Stats stats() {
    Stats stats;
    thread_.call([&] {
      stats = {.clients = clients_.size(),
               .keys = table_.keys(),
               .bytes = table_.bytes(),
               .waiting = table_.waiting(),
               .buffered = buffered_,
               .rejected = rejected_};
    });
    return stats;
  }

 private:
  using ClientId = StoreTable::ClientId;
  static constexpr ClientId kServer = 0;  // no client; nobody gets its replies

  struct Client {
    StoreConnection connection;
    Loop::WatchId watch;
    std::uint32_t events = EPOLLIN;
    std::size_t buffered = 0;  // its part of buffered_
  };

  void watch_listener_on_loop() {
    CONVOY_DCHECK(thread_.loop().in_loop());
    listener_watch_ =
        thread_.loop().watch(listener_->fd(), EPOLLIN, [this](std::uint32_t) { accept_on_loop(); });
  }

  void accept_on_loop() {
    CONVOY_DCHECK(thread_.loop().in_loop());
    try {
      while (auto socket = listener_->try_accept()) admit_on_loop(*socket);
    } catch (const Error& error) {
      foreign_.warn("store: ", error.what(), "; trying again");
      thread_.loop().unwatch(listener_watch_);
      thread_.loop().cancel(accept_timer_);
      listen_later_on_loop();
    }
  }

  void listen_later_on_loop() {
    CONVOY_DCHECK(thread_.loop().in_loop());
    accept_timer_ = thread_.loop().call_at(Deadline::Clock::now() + kAcceptPause, [this] {
      try {
        watch_listener_on_loop();
      } catch (const Error& error) {
        foreign_.warn("store: ", error.what(), "; trying again");
        listen_later_on_loop();
      }
    });
  }

  void admit_on_loop(Socket& socket) {
    CONVOY_DCHECK(thread_.loop().in_loop());
    try {
      socket.require_same_user();
      add_client_on_loop(socket);
    } catch (const Error& error) {
      ++rejected_;
      foreign_.warn("store: ", error.what());
      say_why(socket, error);
    }
  }

  // Takes the socket, unless it throws.
  void add_client_on_loop(Socket& socket) {
    CONVOY_DCHECK(thread_.loop().in_loop());
    if (clients_.size() >= limits_.clients) {
      fail(ErrorKind::kResource, "the store serves ", clients_.size(),
           " connections already, its limit: one more was refused");
    }
    const ClientId id = next_client_++;
    const auto watch = thread_.loop().watch(
        socket.fd(), EPOLLIN, [this, id](std::uint32_t events) { ready_on_loop(id, events); });
    clients_.emplace(id,
                     Client{StoreConnection(std::move(socket), request_limits(limits_)), watch});
  }

  void ready_on_loop(ClientId id, std::uint32_t events) {
    CONVOY_DCHECK(thread_.loop().in_loop());
    Client& client = clients_.at(id);
    try {
      if (events & EPOLLHUP) client.connection.hang_up();
      if (events & EPOLLOUT) client.connection.flush();
      const bool readable = (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0;
      const bool open =
          !readable || client.connection.congested() || client.connection.receive(read_buffer_);
      if (!open) client.connection.hang_up();  // and yet do what it still asked for
      while (auto request = client.connection.next()) {
        table_.handle(id, std::move(*request), Deadline::Clock::now());
      }
      shed_on_loop(client);
      settle_on_loop(client);
      if (!open) remove_on_loop(id);
    } catch (const Error& error) {
      close_with_on_loop(id, error);
    } catch (const std::bad_alloc&) {
      close_with_on_loop(id, Error(ErrorKind::kResource, "store: out of memory"));
    }
    arm_timer_on_loop();
  }

  void close_with_on_loop(ClientId id, const Error& error) {
    CONVOY_DCHECK(thread_.loop().in_loop());
    ++rejected_;
    foreign_.warn("store: closing a connection: ", error.what());
    reply_on_loop(id, {.message = error_reply(kConnectionId, error.kind(), error.what())});
    remove_on_loop(id);
  }

  // Drops the large request of which a part has arrived when all such parts together are too much.
  void shed_on_loop(Client& client) {
    CONVOY_DCHECK(thread_.loop().in_loop());
    account_on_loop(client);
    if (buffered_ <= limits_.total_bytes || client.connection.congested()) return;
    if (client.connection.incoming_bytes() > kSmallBytes) client.connection.skip_incomplete();
  }

  // After anything was done with a connection: what it holds and what it waits for.
  void settle_on_loop(Client& client) {
    CONVOY_DCHECK(thread_.loop().in_loop());
    account_on_loop(client);
    const std::uint32_t wanted = client.connection.wanted_events();
    if (wanted == client.events) return;
    thread_.loop().modify(client.watch, wanted);
    client.events = wanted;
  }

  void account_on_loop(Client& client) {
    CONVOY_DCHECK(thread_.loop().in_loop());
    const std::size_t now = client.connection.held_bytes();
    buffered_ = buffered_ - client.buffered + now;
    client.buffered = now;
  }

  // Does not throw: a reply may go to any client while another one is being looked at. A connection
  // that fails here is shut down and then removed by its own event.
  // NOLINTNEXTLINE(bugprone-exception-escape): what is checked first holds
  void reply_on_loop(ClientId id, StoreReply reply) noexcept {
    CONVOY_DCHECK(thread_.loop().in_loop());
    const auto found = clients_.find(id);
    if (found == clients_.end()) return;
    Client& client = found->second;
    try {
      const std::uint32_t request = reply.message.id;
      const std::size_t bytes = body_bytes(reply.message);
      if (bytes > kSmallBytes && buffered_ + bytes > limits_.total_bytes) {
        reply = {.message = error_reply(
                     request, ErrorKind::kResource,
                     concat("store: a reply of ", bytes, " bytes; replies that were not fetched ",
                            "and requests that came in part hold ", buffered_, " of ",
                            limits_.total_bytes, " bytes already"))};
      }
      client.connection.reply(std::move(reply));
      settle_on_loop(client);
    } catch (const std::exception& error) {
      foreign_.warn("store: closing a connection: ", error.what());
      client.connection.shutdown();
    }
  }

  void remove_on_loop(ClientId id) {
    CONVOY_DCHECK(thread_.loop().in_loop());
    const auto found = clients_.find(id);
    if (found == clients_.end()) return;
    thread_.loop().unwatch(found->second.watch);
    buffered_ -= found->second.buffered;
    clients_.erase(found);
    table_.drop(id);
  }

  void arm_timer_on_loop() {
    CONVOY_DCHECK(thread_.loop().in_loop());
    const auto next = table_.next_expiry();
    if (next == armed_) return;
    if (armed_) thread_.loop().cancel(timer_);
    armed_ = next;
    if (!next || *next == Deadline::Clock::time_point::max()) return;
    timer_ = thread_.loop().call_at(*next, [this] {
      armed_.reset();
      table_.expire(Deadline::Clock::now());
      arm_timer_on_loop();
    });
  }

  const StoreLimits limits_;
  StoreTable table_;
  std::unordered_map<ClientId, Client> clients_;
  ClientId next_client_ = 1;
  std::size_t buffered_ = 0;  // requests that have come in part, replies that are not sent yet
  std::array<std::byte, kSmallBytes> read_buffer_;
  std::optional<Listener> listener_;
  Loop::WatchId listener_watch_ = 0;
  Loop::TimerId accept_timer_ = 0;
  std::size_t rejected_ = 0;
  LogLimit foreign_;  // of lines that clients cause
  std::optional<Deadline::Clock::time_point> armed_;
  Loop::TimerId timer_ = 0;
  LoopThread thread_{"convoy-store"};  // last: its handlers use everything above
};

StoreServer::StoreServer(const StoreLimits& limits) : impl_(std::make_unique<Impl>(limits)) {}
StoreServer::~StoreServer() = default;
UniqueFd StoreServer::connect() { return impl_->connect(); }
std::string StoreServer::listen(const std::string& folder, const std::string& name) {
  return impl_->listen(folder, name);
}
void StoreServer::unlink() { impl_->unlink(); }
void StoreServer::append(const std::string& key, const std::string& value) {
  impl_->append(key, value);
}
StoreServer::Stats StoreServer::stats() { return impl_->stats(); }

}  // namespace convoy
