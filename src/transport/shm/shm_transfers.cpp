// The shared-memory endpoint: large letters that arrive. Everything here runs under
// ShmEndpoint::mutex_, which is let go of around calls of the inbox and around copying.
#include <sys/uio.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "os/memory_pool.h"
#include "transport/shm/shm_endpoint_impl.h"

namespace convoy::shm {

using transport::Arrival;
using transport::Part;

namespace {

// From the memory of another process. False: it could not be read.
bool read_memory(pid_t pid, std::uint64_t from, std::byte* to, std::size_t bytes) {
  while (bytes != 0) {
    const iovec local{to, bytes};
    const iovec remote{reinterpret_cast<void*>(from), bytes};
    const ssize_t got = ::process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (got <= 0) {
      if (got < 0 && errno == EINTR) continue;
      return false;
    }
    to += got;
    from += static_cast<std::uint64_t>(got);
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

// Looks at a letter whose sender still copies, before the sender's knock is waited for: they take a
// few times as long as a step of the sender.
constexpr int kMostPollsInVain = 1000;

[[noreturn]] void fail_gone_while_read() {
  fail(ErrorKind::kPeerLost, "the sender has gone while its memory was read");
}

Part pool_part(std::size_t bytes, std::byte** data) {
  auto& pool = MemoryPool::instance();
  std::shared_ptr<void> memory(pool.allocate(bytes), [&pool](void* place) { pool.free(place); });
  *data = static_cast<std::byte*>(memory.get());
  return {{*data, bytes}, Part::Where::kOwned, std::move(memory)};
}

}  // namespace

// Finds out whether the writer of the ring lets us read its memory, and tells it.
void ShmRemote::probe() {
  RingLayout& layout = in_.reader->layout();
  std::uint64_t value = 0;
  const bool allowed = read_memory(info_.pid, layout.probe_address,
                                   reinterpret_cast<std::byte*>(&value), sizeof value) &&
                       value == layout.probe_value;
  layout.direct.store(allowed ? RingLayout::kAllowed : RingLayout::kRefused,
                      std::memory_order_release);
}

void ShmEndpoint::start_transfer(ShmRemote& remote, std::span<const std::byte> entry,
                                 const ParsedLetter& letter) {
  if (!remote.in().reader) return;  // it was broken off, for another letter of its
  pace_.discount_letter();
  auto transfer = std::make_unique<Transfer>();
  transfer->remote = &remote;
  transfer->peer = remote.links_.at(0).peer;
  transfer->entry.assign(entry.begin(), entry.end());
  transfer->letter = parse_letter(transfer->entry);
  const auto borrow = [&](std::uint16_t loan, bool knock) {
    return std::make_shared<Borrowed>(remote.in().reader, remote.bell_,
                                      static_cast<std::uint16_t>(loan - 1), knock);
  };
  if (letter.loan != 0) transfer->hold = borrow(letter.loan, false);
  if (letter.direct_loan != 0) transfer->direct = borrow(letter.direct_loan, true);
  ++remote.in().transfers;
  remote.in().stalled.push_back(std::move(transfer));
  retry_stalled(remote);
}

// Those whose memory is known here, and has something new in it, can go on.
void ShmEndpoint::retry_stalled(ShmRemote& remote) {
  auto stalled = std::exchange(remote.in().stalled, {});
  for (auto& transfer : stalled) {
    bool goes_on = false;
    try {
      goes_on = transfer->placed ? transfer->can_go_on() : resolve(*transfer);
    } catch (const Error& error) {
      end_transfer(remote);
      break_off(remote, concat("sent something unusable: ", error.what()));
      continue;
    }
    if (goes_on) {
      go_on(std::move(transfer));
    } else {
      stall(std::move(transfer));
    }
  }
}

void ShmEndpoint::go_on(std::unique_ptr<Transfer> transfer) {
  const bool reply = transfer->letter.reply && !transfer->remote->in().joining;
  backlog_.add_transfer(reply, std::move(transfer));
  if (reply) {
    ring(bell_->waiters, 1);
  } else {
    bell_.ring_service();
  }
}

// A segment is still on its way, or the sender has stopped to fill it. Of one that is gone nothing
// more comes.
void ShmEndpoint::stall(std::unique_ptr<Transfer> transfer) {
  ShmRemote& remote = *transfer->remote;
  if (remote.in().ending) {
    transfer.reset();
    return end_transfer(remote);
  }
  remote.in().stalled.push_back(std::move(transfer));
  // Each of them holds a loan.
  if (remote.in().stalled.size() > RingLayout::kLoans) {
    break_off(remote, "has begun more messages than it can lend");
  }
}

// False: a segment is still on its way.
bool ShmEndpoint::resolve(Transfer& transfer) {
  ShmRemote& remote = *transfer.remote;
  std::vector<Transfer::Source> sources;
  std::vector<Mapping> memory;
  transfer.stream = nullptr;
  for (const auto& piece : transfer.letter.pieces) {
    Transfer::Source source{.bytes = piece.entry.bytes};
    if (piece.entry.how == PieceEntry::kInline) {
      source.data = piece.bytes.data();
      source.bytes = piece.bytes.size();
    } else if (piece.entry.how == PieceEntry::kDirect) {
      source.address = piece.entry.place;
    } else {
      const auto found = remote.in().segments.find(piece.entry.segment);
      if (found == remote.in().segments.end()) return false;
      Incoming::SegmentSlot& slot = found->second;
      if (!slot.mapping) slot.mapping = adopt_mapping(std::move(slot.fd), slot.bytes);
      if (piece.entry.place > slot.mapping->size() ||
          piece.entry.bytes > slot.mapping->size() - piece.entry.place) {
        fail(ErrorKind::kInvalidArgument, "a piece beyond its segment");
      }
      source.data = slot.mapping->data() + piece.entry.place;
      if (transfer.letter.streams && !transfer.stream) {
        if (piece.entry.place < StreamHead::kBytes || piece.entry.place % 8 != 0) {
          fail(ErrorKind::kInvalidArgument, "a stream without its head");
        }
        transfer.stream = source.data;
        transfer.ready =
            &reinterpret_cast<const StreamHead*>(source.data - StreamHead::kBytes)->ready;
      }
      if (transfer.stream &&
          (source.data < transfer.stream || (!memory.empty() && slot.mapping != memory.front()))) {
        fail(ErrorKind::kInvalidArgument, "a piece beside its stream");
      }
      memory.push_back(slot.mapping);
    }
    sources.push_back(source);
  }
  transfer.sources = std::move(sources);
  if (transfer.hold) transfer.hold->memory = std::move(memory);
  return true;
}

// Without the lock.
void ShmEndpoint::place(Transfer& transfer) {
  const ParsedLetter& letter = transfer.letter;
  const Arrival arrival{letter.kind, letter.reply, letter.head, {}};
  for (std::size_t i = 0; i < transfer.sources.size(); ++i) {
    Transfer::Source& source = transfer.sources[i];
    if (source.bytes == 0) {
      transfer.parts.push_back({.where = Part::Where::kOwned});
      continue;
    }
    const auto to = inbox_.place(*transfer.remote, arrival, i, source.bytes);
    if (!to.empty()) {
      CONVOY_CHECK(to.size() == source.bytes, "Inbox::place gave another size");
      source.to = to.data();
      transfer.parts.push_back({.bytes = to});
    } else if (letter.pieces[i].entry.how == PieceEntry::kLent) {
      transfer.parts.push_back({{source.data, source.bytes}, Part::Where::kLent, transfer.hold});
    } else {
      transfer.parts.push_back(pool_part(source.bytes, &source.to));
    }
  }
}

// Without the lock; true when all is there. Throws kPeerLost if the sender is gone: it is lost in a
// moment, and why is known then. kInvalidArgument if it has sent nonsense.
bool ShmEndpoint::copy_slice(Transfer& transfer, std::size_t budget) {
  bool read = false;
  for (; transfer.piece < transfer.sources.size(); ++transfer.piece, transfer.done = 0) {
    const Transfer::Source& source = transfer.sources[transfer.piece];
    const std::size_t there = transfer.there();
    if (!source.to) {
      if (there < source.bytes) return false;
      continue;
    }
    if (there < transfer.done) fail(ErrorKind::kInvalidArgument, "a stream that goes back");
    const std::size_t bytes = std::min(budget, there - transfer.done);
    if (bytes == 0 && transfer.done < source.bytes) return false;
    if (source.data) {
      std::memcpy(source.to + transfer.done, source.data + transfer.done, bytes);
    } else if (bytes != 0) {
      read = true;
      if (!read_memory(transfer.peer->info().pid, source.address + transfer.done,
                       source.to + transfer.done, bytes)) {
        if (errno == ESRCH) fail_gone_while_read();
        fail(ErrorKind::kInvalidArgument, "its memory cannot be read: ", errno_text(errno));
      }
    }
    budget -= bytes;
    transfer.done += bytes;
    if (transfer.done < source.bytes) break;
  }
  // While that process is there, nobody else has its pid.
  if (read && liveness_by(transfer.peer->pidfd()) == Liveness::kDead) {
    fail_gone_while_read();
  }
  // Looked at after the read: the writer says so before it lets anybody have that memory.
  if (read && transfer.direct->ring->layout().revoked.load() != 0) {
    fail_gone_while_read();
  }
  return transfer.piece == transfer.sources.size();
}

void ShmEndpoint::end_transfer(ShmRemote& remote) {
  --remote.in().transfers;
  if (remote.in().ending && remote.in().transfers == 0) backlog_.add_ring(remote);
}

// A slice of the next one; they take turns.
ShmEndpoint::Moved ShmEndpoint::work_on_transfer(Lock& lock, Serve serve, std::size_t slice) {
  if (!backlog_.has_transfer(serve)) return Moved::kNothing;
  const bool reply = backlog_.has_transfer_of_reply();
  Moved moved = Moved::kSomething;
  auto transfer = backlog_.take_transfer(reply);
  ShmRemote& remote = *transfer->remote;
  if (transfer->settles && remote.in().reader &&
      !remote.in().reader->has_taken(*transfer->settles)) {
    backlog_.put_back_transfer(reply, std::move(transfer));
    backlog_.add_ring(remote);
    return Moved::kSomething;
  }
  lock.unlock();
  bool done = false;
  const auto before = std::pair(transfer->piece, transfer->done);
  std::optional<Error> failure;
  try {
    if (!transfer->placed) place(*transfer);
    transfer->placed = true;
    done = transfer->settles || copy_slice(*transfer, slice);
  } catch (const Error& error) {
    failure = error;
  }
  if (done && transfer->direct && !transfer->settles) {
    // What the sender wrote before now comes before this letter: that it gives it up, perhaps, and
    // changes its memory. The next call goes on.
    transfer->settles = transfer->direct->ring->layout().written.load();
    done = false;
  }
  if (done) {
    Arrival arrival{transfer->letter.kind, transfer->letter.reply, transfer->letter.head,
                    std::move(transfer->parts)};
    // Lent parts keep it; if there are none, the sender has its memory back now.
    transfer->hold.reset();
    transfer->direct.reset();
    // As any other letter: if this call waits, lost() does not wait for it.
    const std::uint32_t replies = serve == Serve::kReplies ? 1 : 0;
    lock.lock();
    remote.in().taken += replies;
    end_transfer(remote);
    lock.unlock();
    const Delivery delivery(*this, remote, nullptr, replies);
    moved = arrive(remote, std::move(arrival));
  }
  if (failure) transfer.reset();
  const bool in_vain =
      !failure && !done && transfer->stream && before == std::pair(transfer->piece, transfer->done);
  if (!failure && !in_vain) transfer->polls_in_vain = 0;
  lock.lock();
  if (done) return moved;
  if (failure) {
    end_transfer(remote);
    if (failure->kind() != ErrorKind::kPeerLost) break_off(remote, failure->what());
  } else if (in_vain && (++transfer->polls_in_vain >= kMostPollsInVain || remote.in().ending) &&
             !transfer->can_go_on()) {
    // It was looked at once more under the lock: the knock may have been heard before.
    transfer->polls_in_vain = 0;
    stall(std::move(transfer));
  } else {
    backlog_.add_transfer(reply, std::move(transfer));
    // Whoever leaves after this slice may not come back.
    if (!reply) bell_.ring_service_once();
  }
  return moved;
}

}  // namespace convoy::shm
