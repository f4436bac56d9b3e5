// The shared-memory endpoint: what arrives. Everything here runs under ShmEndpoint::mutex_, which
// is let go of around calls of the inbox.
#include <cstring>

#include "base/error.h"
#include "transport/shm/shm_endpoint_impl.h"

namespace convoy::shm {

using transport::Arrival;

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

}  // namespace

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

// One thing. If there was any, the lock may have been let go of. Of the thread that serves, `hand`
// gets requests (kTaken): the caller delivers them.
ShmEndpoint::Moved ShmEndpoint::poll_one(Lock& lock, Serve serve, Handful* hand) {
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
    if (!ready_.empty()) {
      Handful own;
      do {
        Handful& to = hand ? *hand : own;
        if (take_letters(lock, *ready_.front(), serve, to, hand != nullptr, moved)) return moved;
      } while (!ready_.empty());
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

// The first letters of the remote whose turn it is. False: there were none, and it has left the
// queue. Threads in wait() take and deliver several replies at a time. The thread that serves takes
// several requests, and keeps them in its hand: if a call does not return, another thread goes on
// with the others (take_over_hand).
bool ShmEndpoint::take_letters(Lock& lock, ShmRemote& remote, Serve serve, Handful& hand, bool keep,
                               Moved& moved) {
  const bool all = serve == Serve::kAll;
  const std::size_t most = keep || !all ? Handful::kMost : 1;
  std::vector<std::byte> large;
  std::span<const std::byte> entry;
  ParsedLetter alone;
  hand.begin(remote);
  try {
    do {
      if (remote.reader_) entry = remote.reader_->take(hand.room(), large);
      if (entry.empty()) break;
      PlainLetter& letter = hand.letters[hand.count];
      const bool plain = large.empty() && parse_plain(entry, letter);
      if (!plain || letter.reply == all || (letter.reply && remote.joining_)) {
        if (hand.count != 0)
          fail(ErrorKind::kInvalidArgument, "a message that changes while it is read");
        alone = parse_letter(entry);
        break;
      }
      hand.add(entry);
      entry = {};
    } while (hand.count < most && hand.has_room() &&
             remote.reader_->next_is_plain(Handful::kMostBytes, !all));
  } catch (const Error& error) {
    break_off(remote, concat("sent something unusable: ", error.what()));
    entry = {};
  }
  if (entry.empty() && hand.count == 0) {
    dequeue(remote);
    end_burst(remote, /*drained=*/true);
    const bool delivered = remote.taken_ == remote.delivered_.load();
    if (remote.ending_ && remote.transfers_ == 0 && delivered) finish_loss(remote);
    return false;
  }
  count_letters(remote, entry.empty() ? static_cast<int>(hand.count) : 1);
  moved = Moved::kSomething;
  if (entry.empty() && keep) {
    in_hand_ = &hand;
    moved = Moved::kTaken;
  } else if (entry.empty()) {
    moved = deliver_hand(lock, hand);
  } else if (alone.large) {
    start_transfer(remote, entry, alone);
  } else if (all) {
    moved = deliver(lock, remote, alone);
  } else if (alone.reply && !remote.joining_) {
    ++remote.taken_;
    const Delivery delivery(*this, remote, nullptr, 1);
    moved = deliver(lock, remote, alone);
  } else {
    push_task({.type = Task::Type::kLetter,
               .remote = &remote,
               .entry = std::vector<std::byte>(entry.begin(), entry.end())});
  }
  return true;
}

// So many were taken.
void ShmEndpoint::count_letters(ShmRemote& remote, int letters) {
  since_slice_ += static_cast<unsigned>(letters);
  in_a_row_ = std::exchange(last_, &remote) == &remote ? in_a_row_ + letters : letters;
  if (!remote.reader_) return;  // it was broken off
  if (in_a_row_ >= kLettersUntilWatched && watched_ != &remote) set_watched(&remote);
  remote.burst_ += letters;
  if (!remote.reader_->has_letter() && !remote.ending_) {
    // Looked at after its bit was cleared: what is written from now on is knocked for, or is seen
    // in the ring that is watched.
    dequeue(remote);
    end_burst(remote, /*drained=*/true);
  } else if (remote.burst_ >= kBurst) {
    remote.burst_ = 0;
    ready_.pop_front();
    ready_.push_back(&remote);
    end_burst(remote, /*drained=*/false);
  }
}

ShmEndpoint::Moved ShmEndpoint::arrive(ShmRemote& remote, const PlainLetter& letter) {
  return arrive(remote, Arrival{letter.kind, letter.reply, letter.head(), {}});
}

ShmEndpoint::Moved ShmEndpoint::deliver_hand(Lock& lock, Handful& hand) {
  ShmRemote& remote = *hand.remote;
  const bool replies = hand.letters[0].reply;
  if (replies) remote.taken_ += hand.count;
  lock.unlock();
  Moved moved = Moved::kSomething;
  const Delivery delivery(*this, remote, &hand, replies ? hand.count : 0);
  while (const PlainLetter* const letter = hand.take_next()) {
    if (arrive(remote, *letter) == Moved::kReply) moved = Moved::kReply;
  }
  return moved;
}

constinit thread_local Delivery* Delivery::innermost = nullptr;

void Delivery::settle() {
  if (const std::uint32_t replies = std::exchange(replies_, 0)) {
    endpoint_.count_delivered(remote_, replies);
  }
}

// Also at other endpoints than the one where it waits: others wait there, perhaps.
void Delivery::finish_from(Delivery* delivery) {
  for (; delivery; delivery = delivery->outer_) {
    if (delivery->hand_) {
      while (const PlainLetter* const letter = delivery->hand_->take_next()) {
        delivery->endpoint_.arrive(delivery->remote_, *letter);
      }
    }
    delivery->settle();
    delivery->endpoint_.wake();
  }
}

// lost() waits for replies that are being delivered. In the one order of what is sequentially
// consistent either this thread sees that the remote is lost, or whoever takes its last letter sees
// that these were delivered.
void ShmEndpoint::count_delivered(ShmRemote& remote, std::uint32_t replies) {
  remote.delivered_.fetch_add(replies);
  if (!remote.lost_.load()) return;
  {
    const Lock lock(mutex_);
    enqueue(remote);
  }
  ring_service();
}

// The turn has changed: what its last owner has not begun with comes first.
void ShmEndpoint::take_over_hand() {
  Handful* const hand = std::exchange(in_hand_, nullptr);
  if (!hand) return;
  const std::uint32_t first = hand->next.exchange(Handful::kClosed);
  for (std::uint32_t i = hand->count; i > first; --i) {
    const PlainLetter& letter = hand->letters[i - 1];
    const std::byte* const entry = letter.data - sizeof(LetterEntry);
    tasks_.push_front({.type = Task::Type::kLetter,
                       .remote = hand->remote,
                       .entry = {entry, entry + sizeof(LetterEntry) + padded(letter.bytes)}});
  }
  task_count_.store(tasks_.size());
}

// Some letters were taken: the writer may wait for room. And a knock may mean that it has given
// back what we lent, or has read what we wrote.
void ShmEndpoint::end_burst(ShmRemote& remote, bool drained) {
  if (remote.reader_ && remote.reader_->writer_is_blocked(drained)) remote.bell_->knock(false);
  if (remote.look_at_sent()) push_task({.type = Task::Type::kRoom, .remote = &remote});
  if (!remote.stalled_.empty()) [[unlikely]]
    retry_stalled(remote);
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

}  // namespace convoy::shm
