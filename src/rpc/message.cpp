#include "rpc/message.h"

#include <cstring>
#include <utility>

#include "rpc/tensor_codec.h"

namespace convoy::rpc {

void OutgoingMessage::Writer::operator()(std::span<std::byte> to) const noexcept {
  try {
    body.write(body.values, to.data(), body.bytes);
    if (!trailer.empty()) std::memcpy(to.data() + body.bytes, trailer.data(), trailer.size());
  } catch (...) {
    // Another thread changes the values. What is there now fits nothing: the callee refuses it.
    if (!to.empty()) std::memset(to.data(), 0xff, to.size());
  }
}

OutgoingMessage::OutgoingMessage(const detail::Body& body, std::span<const std::byte> trailer)
    : writer_{body, trailer} {
  pieces_ = pieces_of(*body.tensors, kept_);
  if (writer_.bytes() <= agent::Outgoing::kMostBody) return;
  long_body_.resize(writer_.bytes());
  writer_(long_body_);
  pieces_.insert(pieces_.begin(), {.bytes = long_body_, .stays = false});
}

agent::Outgoing OutgoingMessage::outgoing() {
  agent::Outgoing result{.pieces = pieces_};
  if (long_body_.empty()) result.body = transport::Head(writer_.bytes(), writer_);
  if (!kept_.empty()) result.on_sent = [tensors = std::move(kept_)](const Error*) {};
  return result;
}

IncomingMessage::IncomingMessage(std::span<const std::byte> body,
                                 std::vector<transport::Part>& parts)
    : parts_(parts), body_(find_body(body)), source_(body_.data(), body_.size(), &parts_) {}

std::span<const std::byte> IncomingMessage::find_body(std::span<const std::byte> body) {
  if (!body.empty() || parts_.empty()) return body;
  const transport::Part& first = parts_.front();
  parts_ = parts_.subspan(1);
  if (first.where != transport::Part::Where::kLent) return first.bytes;
  // What is checked must not change any more.
  copy_.assign(first.bytes.begin(), first.bytes.end());
  return copy_;
}

}  // namespace convoy::rpc
