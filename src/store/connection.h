#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "os/socket.h"
#include "store/protocol.h"
#include "store/table.h"

namespace convoy {

// One client as the server sees it: requests come out, replies go in, nothing blocks and nothing
// grows without bound. Lives on the server's loop.
class StoreConnection {
 public:
  StoreConnection(Socket socket, const FrameLimits& limits)
      : socket_(std::move(socket)), decoder_(limits) {}

  int fd() const { return socket_.fd(); }
  // What to wait for with epoll.
  std::uint32_t wanted_events() const;

  // Reads once, by way of `buffer`. False: the client has closed its end.
  bool receive(std::span<std::byte> buffer);
  // The next request; nullopt if none is complete, or if the client is congested.
  std::optional<StoreMessage> next();
  // So many replies wait to be fetched that nothing more is read from the client or done for it.
  bool congested() const { return unsent_bytes_ > kMaxUnsent; }

  // Queues and sends what the socket takes.
  void reply(StoreReply reply);
  void flush();
  // Ends both directions; the loop sees it as an event.
  void shutdown() noexcept { socket_.shutdown(); }
  // The client reads no more replies; what it asked for before still counts.
  void hang_up();

  // A request has come in part; its bytes are dropped and it gets a kResource answer.
  void skip_incomplete() { decoder_.skip_incomplete(); }
  std::size_t incoming_bytes() const { return decoder_.buffered(); }
  // Memory held for this client alone (values in replies are shared with the table).
  std::size_t held_bytes() const { return decoder_.buffered() + unsent_heads_; }

 private:
  // A reply on its way out.
  struct Outgoing {
    std::string head;
    std::shared_ptr<const StoreValue> value;
  };

  static constexpr std::size_t kMaxUnsent = std::size_t{1} << 20;

  std::optional<std::size_t> send_on(const Outgoing& reply);

  Socket socket_;
  StoreDecoder decoder_;
  std::deque<Outgoing> unsent_;
  std::size_t unsent_bytes_ = 0;  // with the values
  std::size_t unsent_heads_ = 0;  // without
  std::size_t sent_of_first_ = 0;
  bool gone_ = false;
};

}  // namespace convoy
