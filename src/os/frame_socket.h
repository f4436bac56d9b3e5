#pragma once

#include <array>
#include <cstring>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"
#include "os/socket.h"

namespace convoy {

// Frames of one type over a Unix socket, with descriptors: how processes greet each other and pass
// memory on. A frame has a fixed size, so that a reader never has to guess a length, and a `magic`
// that is Frame::kMagic, which every protocol has of its own: any other is kInvalidArgument.
//
// One thread may send while another receives; otherwise not thread-safe.
template <class Frame>
class FrameSocket {
  static_assert(std::has_unique_object_representations_v<Frame>, "padding would go over the wire");

 public:
  explicit FrameSocket(Socket socket) : socket_(std::move(socket)) {}

  Socket& socket() { return socket_; }
  const Socket& socket() const { return socket_; }

  // Small enough to go as a whole or not at all.
  void send(const Frame& frame, const Deadline& deadline, std::span<const int> descriptors = {}) {
    socket_.send(std::as_bytes(std::span(&frame, 1)), deadline, descriptors);
  }
  // Does not wait: a full socket drops it. False: the peer is gone.
  bool try_send(const Frame& frame) {
    return socket_.try_send(std::as_bytes(std::span(&frame, 1))).has_value();
  }

  // nullopt: no whole one is there, or the stream has ended.
  std::optional<Frame> try_receive() {
    while (got_ < sizeof(Frame)) {
      const auto got = socket_.try_receive(std::span(bytes_).subspan(got_), &descriptors_);
      ended_ = !got;
      if (!got || *got == 0) return std::nullopt;
      got_ += *got;
    }
    return take();
  }
  bool ended() const { return ended_; }
  // kTimeout; kPeerLost at the end of the stream.
  Frame receive(const Deadline& deadline) {
    socket_.receive(std::span(bytes_).subspan(got_), deadline, &descriptors_);
    return take();
  }
  // What came with the frames since the last call. kInvalidArgument unless it is so many.
  std::vector<UniqueFd> take_descriptors(std::size_t least, std::size_t most) {
    auto all = std::exchange(descriptors_, {});
    if (all.size() < least || all.size() > most) {
      fail(ErrorKind::kInvalidArgument, all.size(), " descriptors where ", most, " belong");
    }
    return all;
  }
  UniqueFd take_descriptor() { return std::move(take_descriptors(1, 1)[0]); }

 private:
  Frame take() {
    Frame frame;
    std::memcpy(&frame, bytes_.data(), sizeof frame);
    got_ = 0;
    if (frame.magic != Frame::kMagic) fail(ErrorKind::kInvalidArgument, "bad magic");
    return frame;
  }

  Socket socket_;
  std::array<std::byte, sizeof(Frame)> bytes_{};
  std::size_t got_ = 0;
  bool ended_ = false;
  std::vector<UniqueFd> descriptors_;
};

}  // namespace convoy
