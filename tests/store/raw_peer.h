#pragma once

#include <poll.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "os/socket.h"
#include "store/protocol.h"
#include "store/server.h"
#include "store/socket_store.h"
#include "store_variants.h"

namespace convoy::test {

inline std::shared_ptr<Store> client_of(StoreServer& server) {
  return make_socket_store(Socket(server.connect()));
}

// The other end of a store's connection without the manners of a Store: sends any bytes, reads when
// it likes.
class RawPeer {
 public:
  explicit RawPeer(Socket connected) : socket(std::move(connected)) {}
  explicit RawPeer(StoreServer& server) : socket(server.connect()) {}

  void send(std::string_view bytes) { socket.send(std::as_bytes(std::span(bytes)), soon()); }
  void send(StoreOp op, std::vector<std::string> parts, std::uint32_t id = 1,
            std::uint64_t timeout_us = 0) {
    send(encode({.code = static_cast<std::uint8_t>(op),
                 .id = id,
                 .timeout_us = timeout_us,
                 .parts = std::move(parts)}));
  }
  // Sends what the socket takes at once; false if it took less than all.
  bool try_send(std::string_view bytes) {
    return socket.try_send(std::as_bytes(std::span(bytes))) == bytes.size();
  }

  // nullopt: the other end has closed the connection. A test fails if nothing comes.
  std::optional<StoreMessage> receive() {
    for (;;) {
      if (auto message = decoder_.next()) return message;
      if (!wait_ready(socket.fd(), POLLIN, soon())) {
        ADD_FAILURE() << "nothing came";
        return std::nullopt;
      }
      std::array<std::byte, 65536> buffer;
      const auto got = socket.try_receive(buffer);
      if (!got) return std::nullopt;
      decoder_.feed(std::span(buffer).first(*got));
    }
  }
  // The kind of the error reply that comes next.
  std::optional<ErrorKind> receive_error() {
    const auto reply = receive();
    if (!reply || reply->code == kReplyOk) return std::nullopt;
    return static_cast<ErrorKind>(reply->code - 1);
  }
  // Reads to the end of the stream.
  bool closed_by_peer() {
    while (receive()) {
    }
    return !testing::Test::HasFailure();
  }

  Socket socket;

 private:
  static constexpr FrameLimits kNoLimits{.body_bytes = UINT32_MAX, .parts = SIZE_MAX};
  StoreDecoder decoder_{kNoLimits};
};

}  // namespace convoy::test
