// Agents: letters go when there is room, in order, and large ones beside small ones.
#include <algorithm>
#include <cstring>

#include "agent/agent_impl.h"
#include "base/error.h"
#include "base/log.h"

namespace convoy::agent {

using transport::Letter;
using transport::SendResult;

namespace {

bool is_answer(LetterType type) { return type == LetterType::kReply || type == LetterType::kError; }

QueuedLetter keep(LetterType type, std::span<const std::byte> head, Outgoing& outgoing) {
  QueuedLetter kept;
  kept.kind = static_cast<transport::LetterKind>(type);
  kept.reply = is_answer(type);
  kept.head.resize(head.size() + outgoing.body.size());
  if (!head.empty()) std::memcpy(kept.head.data(), head.data(), head.size());
  outgoing.body.write(std::span(kept.head).subspan(head.size()));
  for (const Piece& piece : outgoing.pieces) {
    kept.pieces.push_back(piece);
    if (piece.stays) continue;
    kept.data.emplace_back(piece.bytes.begin(), piece.bytes.end());
    kept.pieces.back().bytes = kept.data.back();
  }
  kept.on_sent = std::move(outgoing.on_sent);
  return kept;
}

}  // namespace

void Agent::Ended::tell() noexcept {
  for (auto& [on_sent, why] : letters) {
    if (!on_sent) continue;
    const Error error(ErrorKind::kPeerLost, why);
    on_sent(&error);
  }
  for (auto& [call, failure] : calls) call->ended({.failure = &failure});
}

CallHead Agent::head_of(Peer& peer, const Call& call, std::chrono::nanoseconds remaining) const {
  const std::uint64_t behind = call.number_ - peer.calls.floor();
  return {
      .flags = call.flags_,
      .function = static_cast<std::uint32_t>(peer.functions.place_of(call.function_)),
      .number = call.number_,
      .remaining = call.deadline_.is_never()
                       ? kNoLimit
                       : static_cast<std::uint64_t>(std::max<std::int64_t>(remaining.count(), 0)),
      .slot = call.slot_,
      .behind = static_cast<std::uint32_t>(std::min<std::uint64_t>(behind, UINT32_MAX))};
}

void Agent::send(Peer& peer, Lock& lock, LetterType type, std::span<const std::byte> head,
                 Outgoing& outgoing, Call* call) {
  const bool large = is_large(outgoing.pieces);
  const std::uint32_t slot = call ? call->slot_ : 0;
  const std::uint64_t number = call ? call->number_ : 0;
  const auto queue = [&] {
    QueuedLetter letter = keep(type, head, outgoing);
    letter.call = call;
    letter.slot = slot;
    letter.number = number;
    if (call) record_.queues(call->ticket_);
    peer.outbox.queues[large].push_back(std::move(letter));
  };
  if (!peer.contact.open || !peer.outbox.queues[large].empty() || (large && peer.outbox.flushing)) {
    queue();
    lock.unlock();
    return;
  }
  CallHead call_head;
  std::span<const std::byte> front = head;
  if (call) {
    call_head = head_of(peer, *call, call->timeout_left_);
    front = std::as_bytes(std::span(&call_head, 1));
  }
  auto write = [&](std::span<std::byte> to) {
    if (!front.empty()) std::memcpy(to.data(), front.data(), front.size());
    outgoing.body.write(to.subspan(front.size()));
  };
  const Letter letter{static_cast<transport::LetterKind>(type), is_answer(type),
                      transport::Head(front.size() + outgoing.body.size(), write), outgoing.pieces};
  transport::Remote& remote = *peer.remote.load(std::memory_order_relaxed);
  if (large) lock.unlock();
  // Lost: lost() ends the call.
  if (remote.try_send(letter, outgoing.on_sent) != SendResult::kWouldBlock) {
    if (!large) lock.unlock();
    return;
  }
  if (large) {
    lock.lock();
    if (call && !peer.calls.has(call, slot, number)) {
      lock.unlock();
      return;
    }
    if (peer.contact.lost) {  // meanwhile: nobody would take it out of its queue
      const Error gone(ErrorKind::kPeerLost,
                       concat(peer.worker.name, " is lost: ", peer.contact.why));
      lock.unlock();
      if (outgoing.on_sent) outgoing.on_sent(&gone);
      return;
    }
  }
  queue();
  lock.unlock();
  // There may have been room in the meantime, of which nobody is told again.
  if (large) flush(peer);
}

// Under the lock, which is let go of for a large letter.
SendResult Agent::try_send(Peer& peer, Lock& lock, const QueuedLetter& queued, Ended& ended) {
  CallHead call_head;
  std::span<const std::byte> front;
  if (queued.call) {
    if (peer.functions.place_of(queued.call->function_) < 0) {
      ended.calls.emplace_back(
          queued.call,
          failure_of(*queued.call, ErrorKind::kInvalidArgument,
                     peer.functions.describe_missing(queued.call->function_, peer.worker.name)));
      peer.count_error(*queued.call);
      record_.ended(queued.call->ticket_, CallRecord::End::kFailed, quick_now());
      peer.calls.unlink(*queued.call);
      return SendResult::kLost;
    }
    call_head = head_of(peer, *queued.call, queued.call->deadline_.when() - now());
    front = std::as_bytes(std::span(&call_head, 1));
  }
  auto write = [&](std::span<std::byte> to) {
    if (!front.empty()) std::memcpy(to.data(), front.data(), front.size());
    if (!queued.head.empty()) {
      std::memcpy(to.data() + front.size(), queued.head.data(), queued.head.size());
    }
  };
  const Letter letter{queued.kind, queued.reply,
                      transport::Head(front.size() + queued.head.size(), write), queued.pieces};
  transport::Remote& remote = *peer.remote.load(std::memory_order_relaxed);
  const bool large = is_large(queued.pieces);
  if (large) lock.unlock();
  SendResult result = SendResult::kLost;
  const auto sent = quick_now();
  try {
    result = remote.try_send(letter, queued.on_sent);
    if (large) lock.lock();
    if (result == SendResult::kSent && peer.calls.has(queued.call, queued.slot, queued.number)) {
      record_.sent(queued.call->ticket_, sent);
    }
  } catch (const Error& error) {
    if (large) lock.lock();
    log_warn("rpc, ", options_.name, ": a message to ", peer.worker.name,
             " cannot be sent: ", error.what());
    if (peer.calls.has(queued.call, queued.slot, queued.number)) {
      ended.calls.emplace_back(queued.call, failure_of(*queued.call, error.kind(), error.what()));
      peer.count_error(*queued.call);
      record_.ended(queued.call->ticket_, CallRecord::End::kFailed, quick_now());
      peer.calls.unlink(*queued.call);
    } else if (queued.reply) {
      // The caller hears of it.
      const auto reply = decode_head<ReplyHead>(queued.head, "reply");
      ended.replies.push_back({reply.slot, reply.number, error});
    }
  }
  return result;
}

void Agent::flush_queue(Peer& peer, Lock& lock, bool large, Ended& ended) {
  auto& queue = peer.outbox.queues[large];
  while (peer.contact.open && !queue.empty()) {
    QueuedLetter letter = std::move(queue.front());
    queue.pop_front();
    if (try_send(peer, lock, letter, ended) != SendResult::kWouldBlock) continue;
    if (letter.call && !peer.calls.has(letter.call, letter.slot, letter.number)) continue;
    // Lost meanwhile: nobody would take it out again.
    if (!peer.contact.lost) queue.push_front(std::move(letter));
    break;
  }
}

void Agent::flush(Peer& peer) noexcept {
  Ended ended;
  Lock lock(peer.mutex);
  flush_queue(peer, lock, /*large=*/false, ended);
  if (peer.outbox.flushing) {
    peer.outbox.flush_again = true;
  } else if (!peer.outbox.queues[1].empty()) {
    peer.outbox.flushing = true;
    do {
      peer.outbox.flush_again = false;
      flush_queue(peer, lock, /*large=*/true, ended);
    } while (peer.outbox.flush_again);
    peer.outbox.flushing = false;
  }
  lock.unlock();
  for (const auto& [slot, number, error] : ended.replies) {
    lock.lock();
    say_error(peer, lock, slot, number, error.kind(), "convoy::Error", error.what());
  }
  ended.tell();
  // Who shuts down waits for queues to be empty.
  if (!ended.calls.empty() || ending_.draining.load(std::memory_order_relaxed)) endpoint_->wake();
}

void Agent::send_letter(WorkerId to, transport::LetterKind kind, Outgoing outgoing) {
  require_home();
  Peer& known = peer(to);
  if (kind < kFirstOtherLetter) fail(ErrorKind::kInvalidArgument, "a message of kind ", kind);
  if (!known.remote.load(std::memory_order_acquire)) connect(known);
  Lock lock(known.mutex);
  if (known.contact.lost || ending_.closed.load()) return;
  send(known, lock, static_cast<LetterType>(kind), {}, outgoing);
}

void Agent::on_letter(transport::LetterKind kind, LetterHandler handler) {
  roster_.check_not_begun();
  CONVOY_CHECK(kind >= kFirstOtherLetter);
  listeners_.letters[kind] = std::move(handler);
}

void Agent::on_admitted(std::function<void(WorkerId)> handler) {
  roster_.check_not_begun();
  listeners_.admitted = std::move(handler);
}

void Agent::on_stranger(std::function<void()> handler) {
  roster_.check_not_begun();
  listeners_.stranger = std::move(handler);
}

void Agent::on_lost(std::function<void(const Worker&, const Error&)> handler) {
  roster_.check_not_begun();
  listeners_.lost.push_back(std::move(handler));
}

}  // namespace convoy::agent
