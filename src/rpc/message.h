#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "agent/call.h"
#include "convoy/detail/rpc_values.h"

namespace convoy::rpc {

// Values as the engine sends them. A body that is too long for a letter's head is its first piece;
// its head is empty then. Refers to the values.
class OutgoingMessage {
 public:
  // The trailer goes behind the body.
  explicit OutgoingMessage(const detail::Body& body, std::span<const std::byte> trailer = {});
  OutgoingMessage(const OutgoingMessage&) = delete;
  OutgoingMessage& operator=(const OutgoingMessage&) = delete;

  agent::Outgoing outgoing();  // once

 private:
  struct Writer {
    const detail::Body& body;
    std::span<const std::byte> trailer;
    std::size_t bytes() const { return body.bytes + trailer.size(); }
    void operator()(std::span<std::byte> to) const noexcept;
  };

  Writer writer_;
  std::vector<std::byte> long_body_;
  std::vector<transport::Piece> pieces_;
  std::vector<at::Tensor> kept_;
};

// What arrived, as a source of values. Refers to it.
class IncomingMessage {
 public:
  IncomingMessage(std::span<const std::byte> body, std::vector<transport::Part>& parts);
  IncomingMessage(const IncomingMessage&) = delete;
  IncomingMessage& operator=(const IncomingMessage&) = delete;

  detail::ValueSource& source() { return source_; }

 private:
  std::span<const std::byte> find_body(std::span<const std::byte> body);

  std::span<transport::Part> parts_;
  std::vector<std::byte> copy_;
  const std::span<const std::byte> body_;
  detail::ValueSource source_;
};

}  // namespace convoy::rpc
