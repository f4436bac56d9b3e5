#include "store/server.h"

#include <sys/epoll.h>
#include <sys/stat.h>

#include <array>
#include <deque>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/loop.h"
#include "os/socket.h"
#include "store/protocol.h"
#include "store/table.h"

namespace convoy {
namespace {

// A client that does not read its replies is not read from either once this much waits for it.
constexpr std::size_t kMaxUnsent = std::size_t{1} << 20;

FrameLimits request_limits(const StoreLimits& limits) {
  return {.body_bytes = 2 * limits.value_bytes + limits.key_bytes + 64,
          .parts = limits.keys_per_request};
}

}  // namespace

// All state belongs to the loop's thread; public methods go there with call().
class StoreServer::Impl {
 public:
  explicit Impl(const StoreLimits& limits)
      : limits_(limits), table_(limits, [this](StoreTable::ClientId client, StoreMessage reply) {
          reply_on_loop(client, reply);
        }) {}

  ~Impl() { thread_.join(); }  // before the connections go: no handler may see them half destroyed

  UniqueFd connect() {
    auto [ours, theirs] = Socket::pair();
    thread_.call([&, socket = &ours] { add_client_on_loop(std::move(*socket)); });
    return theirs.release();
  }

  std::string listen(const std::string& folder, const std::string& name) {
    std::string path;
    thread_.call([&] {
      CONVOY_CHECK(!listener_, "the store listens already");
      listener_.emplace(folder, name);
      path = listener_->path();
      thread_.loop().watch(listener_->fd(), EPOLLIN, [this](std::uint32_t) { accept_on_loop(); });
    });
    return path;
  }

  void unlink() {
    thread_.call([&] {
      if (listener_) listener_->unlink();
    });
  }

  Stats stats() {
    Stats stats;
    thread_.call([&] {
      stats = {.clients = clients_.size(),
               .keys = table_.keys(),
               .bytes = table_.bytes(),
               .waiting = table_.waiting(),
               .rejected = rejected_};
    });
    return stats;
  }

 private:
  using ClientId = StoreTable::ClientId;

  struct Client {
    Socket socket;
    StoreDecoder decoder;
    Loop::WatchId watch = 0;
    std::deque<std::string> unsent = {};
    std::size_t unsent_bytes = 0;
    std::size_t sent_of_first = 0;
    std::uint32_t events = EPOLLIN;
  };

  void accept_on_loop() {
    for (;;) {
      std::optional<Socket> socket;
      try {
        socket = listener_->try_accept();
        if (!socket) return;
        socket->require_same_user();
        add_client_on_loop(std::move(*socket));
      } catch (const Error& error) {
        ++rejected_;
        log_warn("store: ", error.what());
        if (!socket)
          return;  // accept itself failed (descriptors are used up): try at the next event
      }
    }
  }

  void add_client_on_loop(Socket socket) {
    if (clients_.size() >= limits_.clients) {
      fail(ErrorKind::kResource, "the store serves ", clients_.size(),
           " connections already: refused");
    }
    const ClientId id = next_client_++;
    const auto [place, added] = clients_.emplace(
        id, Client{.socket = std::move(socket), .decoder = StoreDecoder(request_limits(limits_))});
    place->second.watch =
        thread_.loop().watch(place->second.socket.fd(), EPOLLIN,
                             [this, id](std::uint32_t events) { ready_on_loop(id, events); });
  }

  void ready_on_loop(ClientId id, std::uint32_t events) {
    try {
      bool open = true;
      // A peer that has gone reads no more replies, but what it asked for before still counts.
      if (events & EPOLLHUP) discard_unsent_on_loop(clients_.at(id));
      if (events & EPOLLOUT) open = flush_on_loop(clients_.at(id));
      if (open && (events & (EPOLLIN | EPOLLHUP | EPOLLERR))) open = read_on_loop(id);
      if (open) {
        update_events_on_loop(clients_.at(id));
      } else {
        remove_on_loop(id);
      }
    } catch (const Error& error) {
      ++rejected_;
      log_warn("store: closing a connection: ", error.what());
      remove_on_loop(id);
    }
    arm_timer_on_loop();
  }

  // False: the peer has gone.
  bool read_on_loop(ClientId id) {
    Client& client = clients_.at(id);
    if (client.unsent_bytes > kMaxUnsent) return true;
    const auto got = client.socket.try_receive(read_buffer_);
    if (!got) return false;
    client.decoder.feed(std::span(read_buffer_).first(*got));
    while (auto request = client.decoder.next()) {
      table_.handle(id, std::move(*request), Deadline::Clock::now());
    }
    return true;
  }

  // Queues only: a reply may go to any client, also to one that is being looked at.
  void reply_on_loop(ClientId id, const StoreMessage& reply) {
    const auto found = clients_.find(id);
    if (found == clients_.end()) return;
    Client& client = found->second;
    client.unsent.push_back(encode(reply));
    client.unsent_bytes += client.unsent.back().size();
    // Errors show up as events on the socket.
    flush_on_loop(client);
    update_events_on_loop(client);
  }

  // False: the peer has gone.
  static bool flush_on_loop(Client& client) {
    while (!client.unsent.empty()) {
      const auto rest =
          std::as_bytes(std::span(client.unsent.front())).subspan(client.sent_of_first);
      const auto sent = client.socket.try_send(rest);
      if (!sent) return false;
      client.unsent_bytes -= *sent;
      client.sent_of_first += *sent;
      if (*sent < rest.size()) return true;
      client.unsent.pop_front();
      client.sent_of_first = 0;
    }
    return true;
  }

  static void discard_unsent_on_loop(Client& client) {
    client.unsent.clear();
    client.unsent_bytes = client.sent_of_first = 0;
  }

  void update_events_on_loop(Client& client) {
    std::uint32_t wanted = 0;
    if (client.unsent_bytes <= kMaxUnsent) wanted |= EPOLLIN;
    if (!client.unsent.empty()) wanted |= EPOLLOUT;
    if (wanted == client.events) return;
    client.events = wanted;
    thread_.loop().modify(client.watch, wanted);
  }

  void remove_on_loop(ClientId id) {
    const auto found = clients_.find(id);
    if (found == clients_.end()) return;
    thread_.loop().unwatch(found->second.watch);
    clients_.erase(found);
    table_.drop(id);
  }

  void arm_timer_on_loop() {
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
  std::optional<Listener> listener_;
  std::size_t rejected_ = 0;
  std::optional<Deadline::Clock::time_point> armed_;
  Loop::TimerId timer_ = 0;
  std::array<std::byte, std::size_t{64} << 10> read_buffer_;
  LoopThread thread_{"convoy-store"};  // last: its handlers use everything above
};

StoreServer::StoreServer(const StoreLimits& limits) : impl_(std::make_unique<Impl>(limits)) {}
StoreServer::~StoreServer() = default;
UniqueFd StoreServer::connect() { return impl_->connect(); }
std::string StoreServer::listen(const std::string& folder, const std::string& name) {
  return impl_->listen(folder, name);
}
void StoreServer::unlink() { impl_->unlink(); }
StoreServer::Stats StoreServer::stats() { return impl_->stats(); }

}  // namespace convoy
