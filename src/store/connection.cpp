#include "store/connection.h"

#include <sys/epoll.h>

#include <utility>

#include "base/error.h"

namespace convoy {
namespace {

// Values up to this size are copied into their reply: one send instead of two.
constexpr std::size_t kCopiedValue = std::size_t{16} << 10;

std::size_t size_of(const std::shared_ptr<const StoreValue>& value) {
  return value ? value->bytes().size() : 0;
}

}  // namespace

std::uint32_t StoreConnection::wanted_events() const {
  return (congested() ? 0U : EPOLLIN) | (unsent_.empty() ? 0U : EPOLLOUT);
}

bool StoreConnection::receive(std::span<std::byte> buffer) {
  const auto got = socket_.try_receive(buffer);
  if (!got) return false;
  decoder_.feed(buffer.first(*got));
  return true;
}

std::optional<StoreMessage> StoreConnection::next() {
  if (congested()) return std::nullopt;
  return decoder_.next();
}

void StoreConnection::reply(StoreReply reply) {
  if (gone_) return;
  Outgoing next;
  if (size_of(reply.value) <= kCopiedValue) {
    next.head = encode(std::move(reply).to_message());
  } else {
    next.head = encode_before(reply.message, size_of(reply.value));
    next.value = std::move(reply.value);
  }
  unsent_heads_ += next.head.size();
  unsent_bytes_ += next.head.size() + size_of(next.value);
  unsent_.push_back(std::move(next));
  if (unsent_.size() == 1) flush();
}

// Sends from where the reply stands; nullopt: the peer has gone.
std::optional<std::size_t> StoreConnection::send_on(const Outgoing& reply) {
  const bool in_head = sent_of_first_ < reply.head.size();
  const std::string& bytes = in_head ? reply.head : reply.value->bytes();
  const std::size_t done = in_head ? sent_of_first_ : sent_of_first_ - reply.head.size();
  return socket_.try_send(std::as_bytes(std::span(bytes)).subspan(done));
}

void StoreConnection::flush() {
  while (!unsent_.empty()) {
    const Outgoing& first = unsent_.front();
    const auto sent = send_on(first);
    if (!sent) return hang_up();
    if (*sent == 0) return;
    unsent_bytes_ -= *sent;
    sent_of_first_ += *sent;
    if (sent_of_first_ < first.head.size() + size_of(first.value)) continue;
    unsent_heads_ -= first.head.size();
    unsent_.pop_front();
    sent_of_first_ = 0;
  }
}

void StoreConnection::hang_up() {
  gone_ = true;
  unsent_.clear();
  unsent_bytes_ = unsent_heads_ = sent_of_first_ = 0;
}

}  // namespace convoy
