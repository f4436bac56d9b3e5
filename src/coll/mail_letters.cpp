// How messages move: letters into and out of the rings, and large data beside them.
#include <algorithm>
#include <cstring>
#include <new>

#include "base/error.h"
#include "coll/engine.h"
#include "coll/mail.h"

namespace convoy::coll {
namespace {

constexpr std::size_t kBounceBytes = Bounce::kData + Bounce::kChunk * Bounce::kChunks;
constexpr std::size_t kSpareBounces = 4;
// Copied at once from shared memory, so that other messages get their turn.
constexpr std::size_t kStride = std::size_t{1} << 20;

template <class Value>
Value body_as(const std::array<std::byte, Letter::kBodyBytes>& body) {
  Value value;
  std::memcpy(&value, body.data(), sizeof value);
  return value;
}

template <class Value>
std::span<const std::byte> bytes_of(const Value& value) {
  return {reinterpret_cast<const std::byte*>(&value), sizeof value};
}

}  // namespace

// One look at everything; true if something moved.
bool Mail::progress() {
  if (stopped_) return false;
  bool moved = false;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    moved |= take_letters(r);
    moved |= write_letters(r);
    moved |= fill_bounces(r);
    moved |= copy_arriving(r);
  }
  return moved;
}

void Mail::ring(int rank) noexcept { convoy::ring(engine_.head(rank).mail); }

bool Mail::has_room(int rank) {
  Channel& channel = engine_.layout_.channel(engine_.base_, rank_, rank);
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  // The receiver's line is looked at once a round of the ring.
  if (peer.written - peer.seen_taken < Channel::kLetters) return true;
  const auto full = [&] {
    peer.seen_taken = channel.taken.load(std::memory_order_acquire);
    return peer.written - peer.seen_taken >= Channel::kLetters;
  };
  if (!full()) return true;
  channel.blocked.raise();
  return !full();
}

void Mail::write(int rank, const Letter::Header& header, std::span<const std::byte> body) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  const std::uint64_t number = ++peer.written;
  Letter& letter = engine_.layout_.channel(engine_.base_, rank_, rank).letter(number);
  letter.header = header;
  std::copy(body.begin(), body.end(), letter.body.begin());
  letter.number.store(number, std::memory_order_release);
  ring(rank);
}

bool Mail::write_letters(int rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  bool moved = false;
  while (!peer.answers.empty() && has_room(rank)) {
    write(rank, peer.answers.front().header, peer.answers.front().body);
    peer.answers.pop_front();
    moved = true;
  }
  while (!peer.outgoing.empty() && has_room(rank)) {
    Transfer& send = *peer.outgoing.front();
    peer.outgoing.pop_front();
    write_send(rank, send);
    moved = true;
  }
  return moved;
}

void Mail::write_send(int rank, Transfer& send) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  Letter::Header header{send.tag, send.bytes, send.type, Letter::Kind::kInline};
  if (send.bytes <= Letter::kBodyBytes) {
    write(rank, header, {send.data, send.bytes});
    return finish(send);
  }
  if (send.bytes <= engine_.layout_.letter_bytes()) {
    header.kind = Letter::Kind::kPayload;
    std::memcpy(engine_.layout_.letter_payload(engine_.base_, rank_, rank, peer.written + 1),
                send.data, send.bytes);
    write(rank, header, {});
    return finish(send);
  }
  auto& fabric = shm::Fabric::instance();
  shm::Location place = fabric.locate(send.data, send.bytes);
  header.kind = Letter::Kind::kShared;
  if (!place) {
    header.kind = Letter::Kind::kBounce;
    try {
      if (spare_.empty()) {
        send.bounce = fabric.allocate(kBounceBytes);
      } else {
        send.bounce = std::move(spare_.back());
        spare_.pop_back();
      }
    } catch (const Error& failure) {
      return finish(send, error(send, failure.kind(), failure.what()));
    }
    new (send.bounce.data()) Bounce;
    place = send.bounce.location();
  }
  peer.unanswered[peer.written + 1] = &send;
  write(rank, header, bytes_of(place));
}

bool Mail::take_letters(int rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  Channel& channel = engine_.layout_.channel(engine_.base_, rank, rank_);
  bool moved = false;
  for (;; moved = true) {
    const std::uint64_t number = peer.taken + 1;
    const Letter& letter = channel.letter(number);
    if (letter.number.load(std::memory_order_acquire) != number) break;
    // A copy: what is checked must be what is used.
    Received received{number, letter.header, letter.body, {}};
    const Letter::Header header = received.header;
    if (!Letter::is_sound(header, engine_.layout_.letter_bytes())) {
      break_group(ErrorKind::kInternal,
                  concat("rank ", rank, " wrote an invalid message (kind ",
                         static_cast<int>(header.kind), ", type ", static_cast<int>(header.type),
                         ", ", header.bytes, " bytes): something overwrites its memory"));
      return true;
    }
    const std::byte* payload =
        header.kind == Letter::Kind::kPayload
            ? engine_.layout_.letter_payload(engine_.base_, rank, rank_, number)
            : nullptr;
    const bool is_answer =
        header.kind == Letter::Kind::kAnswer || header.kind == Letter::Kind::kRefusal;
    if (is_answer) {
      handle_answer(rank, received);
    } else {
      receive_letter(rank, std::move(received), payload);
    }
    took(rank, number);
  }
  return moved;
}

// A sender that waits for room has filled the ring: among the letters that are in it then there are
// some at which this looks.
void Mail::took(int rank, std::uint64_t number) {
  Channel& channel = engine_.layout_.channel(engine_.base_, rank, rank_);
  peers_[static_cast<std::size_t>(rank)].taken = number;
  channel.taken.store(number, std::memory_order_release);
  if (number % (Channel::kLetters / 2) != 0) return;
  if (channel.blocked.take()) ring(rank);
}

void Mail::handle_answer(int rank, const Received& letter) {
  auto& unanswered = peers_[static_cast<std::size_t>(rank)].unanswered;
  const auto found = unanswered.find(body_as<std::uint64_t>(letter.body));
  if (found == unanswered.end()) return;
  Transfer& send = *found->second;
  unanswered.erase(found);
  release_bounce(send);
  if (letter.header.kind == Letter::Kind::kAnswer) return finish(send);
  finish(send, error(send, ErrorKind::kInvalidArgument,
                     concat("rank ", rank, " expects ",
                            describe_elements(letter.header.bytes, letter.header.type),
                            "; nothing was received")));
}

void Mail::release_bounce(Transfer& transfer) {
  if (!transfer.bounce) return;
  if (spare_.size() < kSpareBounces) spare_.push_back(std::move(transfer.bounce));
  transfer.bounce = {};
}

// --- receiving ---

void Mail::receive_letter(int rank, Received letter, const std::byte* payload) {
  for (auto it = receives_.begin(); it != receives_.end(); ++it) {
    Transfer& receive = **it;
    if ((receive.peer >= 0 && receive.peer != rank) || receive.tag != letter.header.tag) continue;
    receives_.erase(it);
    return deliver(receive, rank, std::move(letter), payload);
  }
  // Nobody waits for it yet; the ring must not be kept.
  if (payload) letter.data.assign(payload, payload + letter.header.bytes);
  unexpected_bytes_ += sizeof letter + letter.data.size();
  peers_[static_cast<std::size_t>(rank)].unexpected.push_back(std::move(letter));
}

bool Mail::deliver_unexpected(Transfer& receive) {
  for (int i = 0; i < size_; ++i) {
    // Another rank's turn each time, so that none is forgotten by a receive from any.
    const int rank = receive.peer >= 0 ? receive.peer : (last_any_ + 1 + i) % size_;
    auto& unexpected = peers_[static_cast<std::size_t>(rank)].unexpected;
    const auto found =
        std::find_if(unexpected.begin(), unexpected.end(),
                     [&](const Received& letter) { return letter.header.tag == receive.tag; });
    if (found != unexpected.end()) {
      Received letter = std::move(*found);
      unexpected.erase(found);
      unexpected_bytes_ -= sizeof letter + letter.data.size();
      if (receive.peer < 0) last_any_ = rank;
      const std::byte* data = letter.data.data();
      deliver(receive, rank, std::move(letter), data);
      return true;
    }
    if (receive.peer >= 0) break;
  }
  return false;
}

void Mail::deliver(Transfer& receive, int rank, Received letter, const std::byte* data) {
  const Letter::Header& header = letter.header;
  const bool large = header.kind == Letter::Kind::kShared || header.kind == Letter::Kind::kBounce;
  receive.source = rank;
  if (header.bytes != receive.bytes || header.type != receive.type) {
    if (large) answer(rank, letter, Letter::Kind::kRefusal, receive);
    return finish(
        receive, error(receive, ErrorKind::kInvalidArgument,
                       concat("rank ", rank, " sent ", describe_elements(header.bytes, header.type),
                              "; nothing was received")));
  }
  if (!large) {
    if (header.kind == Letter::Kind::kInline) data = letter.body.data();
    if (receive.bytes != 0) std::memcpy(receive.data, data, receive.bytes);
    return finish(receive);
  }
  peers_[static_cast<std::size_t>(rank)].arriving.push_back({&receive, std::move(letter), nullptr});
}

// Where a large message is; nullptr: its descriptor is still on its way. Does not wait: others need
// the lock.
std::byte* Mail::find_memory(int rank, const Received& letter) const {
  const bool bounce = letter.header.kind == Letter::Kind::kBounce;
  const auto place = body_as<shm::Location>(letter.body);
  if (bounce && place.offset % alignof(Bounce) != 0) {
    fail(ErrorKind::kInvalidArgument, "rank ", rank, " published memory at an odd offset");
  }
  try {
    return engine_.mesh_->resolve(rank, place, bounce ? kBounceBytes : letter.header.bytes,
                                  Deadline::after(std::chrono::nanoseconds(0)));
  } catch (const Error& failure) {
    if (failure.kind() == ErrorKind::kTimeout) return nullptr;
    throw;
  }
}

void Mail::answer(int rank, const Received& letter, Letter::Kind kind, const Transfer& receive) {
  Received reply{0, {letter.header.tag, receive.bytes, receive.type, kind}, {}, {}};
  std::memcpy(reply.body.data(), &letter.number, sizeof letter.number);
  peers_[static_cast<std::size_t>(rank)].answers.push_back(std::move(reply));
  write_letters(rank);
}

// Copies what is there of every large message from this rank.
bool Mail::copy_arriving(int rank) {
  auto& arriving = peers_[static_cast<std::size_t>(rank)].arriving;
  bool moved = false;
  for (auto it = arriving.begin(); it != arriving.end();) {
    Transfer& receive = *it->receive;
    try {
      if (!it->from) it->from = find_memory(rank, it->letter);
    } catch (const Error& failure) {
      answer(rank, it->letter, Letter::Kind::kRefusal, receive);
      it = arriving.erase(it);
      finish(receive, error(receive, failure.kind(), failure.what()));
      moved = true;
      continue;
    }
    if (!it->from) {
      ++it;
      continue;
    }
    const StoreHint hint = hint_for_output(receive.bytes);
    const bool shared = it->letter.header.kind == Letter::Kind::kShared;
    if (shared) {
      const std::size_t bytes = std::min(kStride, receive.bytes - receive.moved);
      copy(receive.data + receive.moved, it->from + receive.moved, bytes, hint);
      receive.moved += bytes;
      moved = true;
    } else {
      auto& bounce = *reinterpret_cast<Bounce*>(it->from);
      // Once all is emptied the block is the sender's again.
      while (receive.moved < receive.bytes &&
             bounce.filled.load(std::memory_order_acquire) > receive.moved) {
        const std::size_t chunk = receive.moved / Bounce::kChunk % Bounce::kChunks;
        const std::size_t bytes = std::min(Bounce::kChunk, receive.bytes - receive.moved);
        copy(receive.data + receive.moved, it->from + Bounce::kData + chunk * Bounce::kChunk, bytes,
             hint);
        receive.moved += bytes;
        bounce.emptied.store(receive.moved, std::memory_order_release);
        ring(rank);
        moved = true;
      }
    }
    if (receive.moved < receive.bytes) {
      ++it;
      continue;
    }
    if (shared) answer(rank, it->letter, Letter::Kind::kAnswer, receive);
    it = arriving.erase(it);
    finish(receive);
  }
  return moved;
}

// Puts more of every large private message to this rank into its bounce block.
bool Mail::fill_bounces(int rank) {
  auto& unanswered = peers_[static_cast<std::size_t>(rank)].unanswered;
  bool moved = false;
  for (auto it = unanswered.begin(); it != unanswered.end();) {
    Transfer& send = *it->second;
    if (!send.bounce) {
      ++it;
      continue;
    }
    std::byte* memory = send.bounce.data();
    auto& bounce = *reinterpret_cast<Bounce*>(memory);
    const std::uint64_t emptied = bounce.emptied.load(std::memory_order_acquire);
    while (send.moved < send.bytes && send.moved < emptied + Bounce::kChunk * Bounce::kChunks) {
      const std::size_t chunk = send.moved / Bounce::kChunk % Bounce::kChunks;
      const std::size_t bytes = std::min(Bounce::kChunk, send.bytes - send.moved);
      copy(memory + Bounce::kData + chunk * Bounce::kChunk, send.data + send.moved, bytes,
           StoreHint::kCached);
      send.moved += bytes;
      bounce.filled.store(send.moved, std::memory_order_release);
      ring(rank);
      moved = true;
    }
    if (emptied < send.bytes) {
      ++it;
      continue;
    }
    it = unanswered.erase(it);
    release_bounce(send);
    finish(send);
    moved = true;
  }
  return moved;
}

}  // namespace convoy::coll
