// The shared-memory endpoint: what arrives. Everything here runs under ShmEndpoint::mutex_, which
// is let go of around calls of the inbox and around copying.
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

// Letters that one remote gets delivered before it is the next one's turn.
constexpr int kBurst = 32;
// Letters after which a large one gets on by a slice, however many there are.
constexpr unsigned kLettersPerSlice = 16;
// Letters in a row after which their ring is watched.
constexpr int kLettersUntilWatched = 4;
// A clock costs as much as a letter.
constexpr unsigned kPollsPerTimers = 16;
// Of a large letter, until others have their turn.
constexpr std::size_t kSlice = std::size_t{1} << 20;
// While letters come, too.
constexpr std::size_t kSmallSlice = std::size_t{256} << 10;
// How long the next letter is waited for before a slice: a few microseconds, in which a caller that
// has just had its answer calls again.
constexpr int kSpinsBeforeSlice = 200;

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
  RingLayout& layout = reader_->layout();
  std::uint64_t value = 0;
  const bool allowed = read_memory(info_.pid, layout.probe_address,
                                   reinterpret_cast<std::byte*>(&value), sizeof value) &&
                       value == layout.probe_value;
  layout.direct.store(allowed ? RingLayout::kAllowed : RingLayout::kRefused,
                      std::memory_order_release);
}

// --- the queues ---

void ShmEndpoint::enqueue(ShmRemote& remote) {
  if (remote.queued_ || remote.told_) return;
  remote.queued_ = true;
  remote.burst_ = 0;
  ready_.push_back(&remote);
  ready_count_.store(ready_.size(), std::memory_order_relaxed);
}

// The one whose turn it is.
void ShmEndpoint::dequeue(ShmRemote& remote) {
  ready_.pop_front();
  ready_count_.store(ready_.size(), std::memory_order_relaxed);
  remote.queued_ = false;
}

// Its sender need not knock any more; the one before has to, and may not have known.
void ShmEndpoint::set_watched(ShmRemote* remote) {
  ShmRemote* const before = std::exchange(watched_, remote);
  const auto ring = std::exchange(watched_ring_, remote ? remote->reader_ : nullptr);
  bell().watched.exchange(remote ? remote->number_ + 1 : 0);
  if (before && ring->has_letter()) enqueue(*before);
}

void ShmEndpoint::push_task(Task task) {
  tasks_.push_back(std::move(task));
  task_count_.store(tasks_.size());
  ring_service();
}

ShmEndpoint::Moved ShmEndpoint::run_task(Lock& lock) {
  Task task = std::move(tasks_.front());
  tasks_.pop_front();
  task_count_.store(tasks_.size());
  ShmRemote& remote = *task.remote;
  if (task.type == Task::Type::kLetter) return deliver(lock, remote, parse_letter(task.entry));
  lock.unlock();
  const bool lost = task.type == Task::Type::kLost;
  for (auto& [on_sent, received] : task.sent) on_sent(received ? nullptr : &*remote.why_);
  if (task.type == Task::Type::kJoined) inbox_.joined(remote);
  if (task.type == Task::Type::kRoom && !remote.lost()) inbox_.room(remote);
  if (lost) {
    inbox_.lost(remote, *remote.why_);
    wake();
  }
  lock.lock();
  if (task.type == Task::Type::kJoined) remote.joining_ = false;
  return Moved::kSomething;
}

// One thing. If there was any, the lock may have been let go of.
ShmEndpoint::Moved ShmEndpoint::poll_one(Lock& lock, Serve serve) {
  if (has_events_.load(std::memory_order_relaxed)) take_events();
  if (serve == Serve::kAll) {
    if (!tasks_.empty()) return run_task(lock);
    if (++since_timers_ >= kPollsPerTimers) {
      since_timers_ = 0;
      if (timer_is_due() && run_timers(lock)) return Moved::kSomething;
    }
  }
  bell().take([&](std::size_t slot) {
    for (ShmRemote* const remote : slots_[slot]) enqueue(*remote);
  });
  if (sees_watched()) enqueue(*watched_);
  if (since_slice_ < kLettersPerSlice) {
    Moved moved = Moved::kNothing;
    while (!ready_.empty()) {
      ++since_slice_;
      if (take_letter(lock, *ready_.front(), serve, moved)) return moved;
    }
    if (since_slice_ != 0 && has_transfer(serve) && letter_comes(lock)) return Moved::kSomething;
  }
  const std::size_t slice = std::exchange(since_slice_, 0) != 0 ? kSmallSlice : kSlice;
  if (const Moved moved = work_on_transfer(lock, serve, slice); moved != Moved::kNothing)
    return moved;
  if (!ready_.empty() || (serve == Serve::kAll && !tasks_.empty())) return Moved::kSomething;
  return serve == Serve::kAll && timer_is_due() && run_timers(lock) ? Moved::kSomething
                                                                    : Moved::kNothing;
}

bool ShmEndpoint::has_transfer(Serve serve) const {
  return !transfers_[1].empty() || (serve == Serve::kAll && !transfers_[0].empty());
}

// Letters come one after another: the next one goes first, if it comes in a moment. Calls beside a
// large transfer would otherwise wait for a slice each time.
bool ShmEndpoint::letter_comes(Lock& lock) {
  const auto ring = watched_ring_;
  lock.unlock();
  bool comes = false;
  for (int i = 0; i < kSpinsBeforeSlice && !comes; ++i) {
    cpu_relax();
    comes = (ring && ring->has_letter()) || bell().any();
  }
  lock.lock();
  return comes;
}

// --- letters ---

// The first letter of the remote whose turn it is. False: there was none, and it has left the
// queue.
bool ShmEndpoint::take_letter(Lock& lock, ShmRemote& remote, Serve serve, Moved& moved) {
  std::array<std::byte, 1024> small;
  std::vector<std::byte> large;
  std::span<const std::byte> entry;
  ParsedLetter letter;
  try {
    if (remote.reader_) entry = remote.reader_->take(small, large);
    if (!entry.empty()) letter = parse_letter(entry);
  } catch (const Error& error) {
    break_off(remote, concat("sent something unusable: ", error.what()));
    entry = {};
  }
  if (entry.empty()) {
    dequeue(remote);
    end_burst(remote, /*drained=*/true);
    if (remote.ending_ && remote.transfers_ == 0) finish_loss(remote);
    return false;
  }
  in_a_row_ = std::exchange(last_, &remote) == &remote ? in_a_row_ + 1 : 1;
  if (in_a_row_ >= kLettersUntilWatched && watched_ != &remote) set_watched(&remote);
  if (!remote.reader_->has_letter() && !remote.ending_) {
    // Looked at after its bit was cleared: what is written from now on is knocked for, or is seen
    // in the ring that is watched.
    dequeue(remote);
    end_burst(remote, /*drained=*/true);
  } else if (++remote.burst_ >= kBurst) {
    remote.burst_ = 0;
    ready_.pop_front();
    ready_.push_back(&remote);
    end_burst(remote, /*drained=*/false);
  }
  moved = Moved::kSomething;
  if (letter.large) {
    start_transfer(remote, entry, letter);
  } else if ((letter.reply && !remote.joining_) || serve == Serve::kAll) {
    moved = deliver(lock, remote, letter);
  } else {
    push_task({.type = Task::Type::kLetter,
               .remote = &remote,
               .entry = std::vector<std::byte>(entry.begin(), entry.end())});
  }
  return true;
}

// Some letters were taken: the writer may wait for room. And a knock may mean that it has given
// back what we lent, or has read what we wrote.
void ShmEndpoint::end_burst(ShmRemote& remote, bool drained) {
  if (remote.reader_ && remote.reader_->writer_is_blocked(drained)) remote.bell_->knock(false);
  if (remote.look_at_sent()) push_task({.type = Task::Type::kRoom, .remote = &remote});
}

ShmEndpoint::Moved ShmEndpoint::deliver(Lock& lock, ShmRemote& remote, const ParsedLetter& letter) {
  lock.unlock();
  Arrival arrival{letter.kind, letter.reply, letter.head, {}};
  for (std::size_t i = 0; i < letter.pieces.size(); ++i) {
    const auto bytes = letter.pieces[i].bytes;
    const auto to =
        bytes.empty() ? std::span<std::byte>() : inbox_.place(remote, arrival, i, bytes.size());
    if (to.empty()) {
      arrival.parts.push_back(transport::owned_part(bytes));
    } else {
      CONVOY_CHECK(to.size() == bytes.size(), "Inbox::place gave another size");
      std::memcpy(to.data(), bytes.data(), bytes.size());
      arrival.parts.push_back({.bytes = to});
    }
  }
  return arrive(remote, std::move(arrival));
}

ShmEndpoint::Moved ShmEndpoint::arrive(ShmRemote& remote, Arrival&& arrival) {
  const bool reply = arrival.reply;
  const bool& wakes = arrival.wakes;  // the inbox may take the parts, but leaves this
  inbox_.arrived(remote, std::move(arrival));
  return reply && wakes ? Moved::kReply : Moved::kSomething;
}

// --- large letters ---

void ShmEndpoint::start_transfer(ShmRemote& remote, std::span<const std::byte> entry,
                                 const ParsedLetter& letter) {
  auto transfer = std::make_unique<Transfer>();
  transfer->remote = &remote;
  transfer->peer = remote.links_.at(0).peer;
  transfer->entry.assign(entry.begin(), entry.end());
  transfer->letter = parse_letter(transfer->entry);
  const auto borrow = [&](std::uint16_t loan, bool knock) {
    return std::make_shared<Borrowed>(remote.reader_, remote.bell_,
                                      static_cast<std::uint16_t>(loan - 1), knock);
  };
  if (letter.loan != 0) transfer->hold = borrow(letter.loan, false);
  if (letter.direct_loan != 0) transfer->direct = borrow(letter.direct_loan, true);
  ++remote.transfers_;
  remote.stalled_.push_back(std::move(transfer));
  retry_stalled(remote);
}

// Those whose memory is known here can go on.
void ShmEndpoint::retry_stalled(ShmRemote& remote) {
  auto stalled = std::exchange(remote.stalled_, {});
  for (auto& transfer : stalled) {
    bool resolved = false;
    try {
      resolved = resolve(*transfer);
    } catch (const Error& error) {
      end_transfer(remote);
      break_off(remote, concat("sent something unusable: ", error.what()));
      continue;
    }
    if (!resolved && remote.ending_) {
      end_transfer(remote);
      continue;
    }
    if (!resolved) {
      remote.stalled_.push_back(std::move(transfer));
      continue;
    }
    const bool reply = transfer->letter.reply && !remote.joining_;
    transfers_[reply].push_back(std::move(transfer));
    transfer_count_[reply].store(transfers_[reply].size());
    ring(reply ? bell().waiters : bell().service, 1);
  }
}

// False: a segment is still on its way.
bool ShmEndpoint::resolve(Transfer& transfer) {
  ShmRemote& remote = *transfer.remote;
  std::vector<Transfer::Source> sources;
  std::vector<Mapping> memory;
  for (const auto& piece : transfer.letter.pieces) {
    Transfer::Source source{.bytes = piece.entry.bytes};
    if (piece.entry.how == PieceEntry::kInline) {
      source.data = piece.bytes.data();
      source.bytes = piece.bytes.size();
    } else if (piece.entry.how == PieceEntry::kDirect) {
      source.address = piece.entry.place;
    } else {
      const auto found = remote.segments_.find(piece.entry.segment);
      if (found == remote.segments_.end()) return false;
      ShmRemote::SegmentSlot& slot = found->second;
      if (!slot.mapping) slot.mapping = adopt_mapping(std::move(slot.fd), slot.bytes);
      if (piece.entry.place > slot.mapping->size() ||
          piece.entry.bytes > slot.mapping->size() - piece.entry.place) {
        fail(ErrorKind::kInvalidArgument, "a piece beyond its segment");
      }
      source.data = slot.mapping->data() + piece.entry.place;
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
    if (!source.to) continue;
    const std::size_t bytes = std::min(budget, source.bytes - transfer.done);
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
  --remote.transfers_;
  if (remote.ending_ && remote.transfers_ == 0) enqueue(remote);
}

// A slice of the next one; they take turns.
ShmEndpoint::Moved ShmEndpoint::work_on_transfer(Lock& lock, Serve serve, std::size_t slice) {
  if (!has_transfer(serve)) return Moved::kNothing;
  const bool reply = !transfers_[1].empty();
  Moved moved = Moved::kSomething;
  auto& queue = transfers_[reply];
  auto transfer = std::move(queue.front());
  queue.pop_front();
  transfer_count_[reply].store(queue.size());
  ShmRemote& remote = *transfer->remote;
  if (transfer->settles && remote.reader_ && !remote.reader_->has_taken(*transfer->settles)) {
    queue.push_front(std::move(transfer));
    transfer_count_[reply].store(queue.size());
    enqueue(remote);
    return Moved::kSomething;
  }
  lock.unlock();
  bool done = false;
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
    moved = arrive(remote, std::move(arrival));
  }
  if (failure) transfer.reset();
  lock.lock();
  if (failure) {
    end_transfer(remote);
    if (failure->kind() != ErrorKind::kPeerLost) break_off(remote, failure->what());
  } else if (done) {
    end_transfer(remote);
  } else {
    queue.push_back(std::move(transfer));
    transfer_count_[reply].store(queue.size());
    // Whoever leaves after this slice may not come back.
    if (!reply) ring_service();
  }
  return moved;
}

// --- losses ---

// What it sent before still arrives; then finish_loss().
void ShmEndpoint::lose(ShmRemote& remote, const Error& why) {
  if (remote.ending_) return;
  remote.ending_ = true;
  remote.why_ = why;
  remote.lost_.store(true, std::memory_order_release);
  // Segments that have not come will not.
  remote.transfers_ -= remote.stalled_.size();
  remote.stalled_.clear();
  enqueue(remote);
}

void ShmEndpoint::drop_reader(ShmRemote& remote) {
  if (last_ == &remote) last_ = nullptr;
  if (watched_ == &remote) set_watched(nullptr);
  remote.reader_.reset();
}

void ShmEndpoint::break_off(ShmRemote& remote, const std::string& what) {
  drop_reader(remote);
  {
    const std::scoped_lock send_lock(remote.send_mutex_);
    for (const auto& link : remote.links_) link.peer->send_bye();
  }
  lose(remote, Error(ErrorKind::kPeerLost, concat(remote.name(), ": ", what)));
}

void ShmEndpoint::finish_loss(ShmRemote& remote) {
  if (remote.told_) return;
  remote.told_ = true;
  drop_reader(remote);
  remote.segments_.clear();
  std::erase(slots_[remote.number_ % Doorbell::kSlots], &remote);
  std::vector<std::shared_ptr<Peer>> gone;
  Task task{.type = Task::Type::kLost, .remote = &remote};
  {
    const std::scoped_lock send_lock(remote.send_mutex_);
    bool alive = false;
    for (auto& link : remote.links_) {
      owners_.erase(link.peer.get());
      alive |= liveness_by(link.peer->pidfd()) != Liveness::kDead;
      gone.push_back(std::move(link.peer));
    }
    remote.links_.clear();
    if (remote.writer_) remote.writer_.layout().revoked.store(1);
    task.sent = take_loans(remote, alive ? gone.at(0) : nullptr);
    remote.writer_ = {};
  }
  fabric_.forget(std::move(gone));
  push_task(std::move(task));
}

// Of a remote that is lost: what it cannot read any more is free.
std::vector<std::pair<transport::Sent, bool>> ShmEndpoint::take_loans(
    ShmRemote& remote, const std::shared_ptr<Peer>& alive) {
  std::vector<std::pair<transport::Sent, bool>> sent;
  Limbo limbo{.ring = remote.writer_.mapping(), .peer = alive, .blocks = {}};
  auto heap = heap_.lock();
  for (std::size_t i = 0; i < remote.loans_.size(); ++i) {
    auto& loan = remote.loans_[i];
    if (loan.state != ShmRemote::Loan::State::kLent)
      continue;  // one that is being filled: its
                 // sender finds out
    if (loan.on_sent) sent.emplace_back(std::move(loan.on_sent), false);
    if (loan.block && alive) {
      limbo.blocks.emplace(static_cast<std::uint16_t>(i), loan.block);
    } else if (loan.block) {
      heap->arena->free(loan.block);
    }
    remote.lent_bytes_ -= loan.bytes;
    loan = {};
  }
  if (!limbo.blocks.empty()) heap->limbo.push_back(std::move(limbo));
  sweep_limbo(*heap);
  return sent;
}

void ShmEndpoint::sweep_limbo(Heap& heap) {
  std::erase_if(heap.limbo, [&](Limbo& limbo) {
    const bool dead = liveness_by(limbo.peer->pidfd()) == Liveness::kDead;
    const auto& layout = *reinterpret_cast<const RingLayout*>(limbo.ring->data());
    std::erase_if(limbo.blocks, [&](const auto& entry) {
      const auto [loan, block] = entry;
      const bool released = (layout.released[loan / 64].load() >> loan % 64 & 1) != 0;
      if (!dead && !released) return false;
      heap.arena->free(block);
      return true;
    });
    return limbo.blocks.empty();
  });
}

}  // namespace convoy::shm
