#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "os/fork_guard.h"
#include "transport/endpoint.h"
#include "transport/shm/letter_ring.h"
#include "transport/shm/mapping.h"
#include "transport/shm/peer.h"
#include "transport/shm/remote_bell.h"

namespace convoy::shm {

class ShmRemote;

// What a letter lent, at the receiver. Given back when the last part of it is gone; by a forked
// child never.
struct Borrowed {
  std::shared_ptr<RingReader> ring;
  std::shared_ptr<RemoteBell> bell;
  std::uint16_t loan;
  bool knock;
  HomeProcess home;
  std::vector<Mapping> memory;

  Borrowed(std::shared_ptr<RingReader> from, std::shared_ptr<RemoteBell> lender,
           std::uint16_t number, bool knocks)
      : ring(std::move(from)), bell(std::move(lender)), loan(number), knock(knocks) {}
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  ~Borrowed() {
    if (!home.is_here()) return;
    memory.clear();
    if (ring->release(loan) || knock) bell->knock(false);
  }
};

// A large letter that is being taken. Of one thread at a time: whoever has taken it out of a queue.
struct Transfer {
  struct Source {
    const std::byte* data = nullptr;  // in memory that is mapped here
    std::uint64_t address = 0;        // in the sender's
    std::size_t bytes = 0;
    std::byte* to = nullptr;
  };

  ShmRemote* remote;
  std::shared_ptr<Peer> peer;  // whose memory it is
  std::vector<std::byte> entry;
  ParsedLetter letter;               // refers to `entry`
  std::shared_ptr<Borrowed> hold;    // of what was lent
  std::shared_ptr<Borrowed> direct;  // of what is read in the sender's memory
  std::vector<Source> sources;
  // Of one that streams: how much is there, and from where that counts.
  const std::atomic<std::uint64_t>* ready = nullptr;
  const std::byte* stream = nullptr;
  int polls_in_vain = 0;
  std::vector<transport::Part> parts;
  bool placed = false;
  // All was copied; delivered when the ring was read up to there.
  std::optional<std::uint64_t> settles = std::nullopt;
  std::size_t piece = 0;  // where copying is
  std::size_t done = 0;

  // How much of the piece is there. Sequentially consistent: looked at after the sender's bit was
  // cleared, it is what the sender had stored before it found the bit set.
  std::size_t there() const noexcept {
    const Source& source = sources[piece];
    if (!stream || letter.pieces[piece].entry.how != PieceEntry::kLent) return source.bytes;
    const auto begin = static_cast<std::uint64_t>(source.data - stream);
    const std::uint64_t end = ready->load();
    return static_cast<std::size_t>(std::clamp(end, begin, begin + source.bytes) - begin);
  }
  // There is something to copy, or the piece is complete. One whose sender says nonsense goes on,
  // too: copying finds out.
  bool can_go_on() const noexcept {
    if (!stream || piece == sources.size()) return true;
    return sources[piece].to ? there() != done : there() == sources[piece].bytes;
  }
};

}  // namespace convoy::shm
