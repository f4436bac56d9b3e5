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
// How long the next letter is waited for before a slice: a few microseconds, in which a caller that
// has just had its answer calls again.
constexpr int kSpinsBeforeSlice = 200;

}  // namespace

// --- the queues ---

// Its sender need not knock any more; the one before has to, and may not have known.
void ShmEndpoint::set_watched(ShmRemote* remote) {
  const auto [before, ring] = watched_.replace(remote);
  bell_->watched.exchange(watched_.number());
  if (before && ring->has_letter()) backlog_.add_ring(*before);
}

void ShmEndpoint::push_task(Task task) {
  backlog_.add_task(std::move(task));
  bell_.ring_service_once();
}

ShmEndpoint::Moved ShmEndpoint::run_task(Lock& lock) {
  Task task = backlog_.take_task();
  ShmRemote& remote = *task.remote;
  if (task.type == Task::Type::kLetter) return deliver(lock, remote, parse_letter(task.entry));
  lock.unlock();
  const bool lost = task.type == Task::Type::kLost;
  for (auto& [on_sent, received] : task.sent) on_sent(received ? nullptr : &*remote.in().why);
  if (task.type == Task::Type::kJoined) inbox_.joined(remote);
  if (task.type == Task::Type::kRoom && !remote.lost()) inbox_.room(remote);
  if (lost) {
    inbox_.lost(remote, *remote.in().why);
    wake();
  }
  lock.lock();
  if (task.type == Task::Type::kJoined) remote.in().joining = false;
  return Moved::kSomething;
}

// One thing. If there was any, the lock may have been let go of. Of the thread that serves, `hand`
// gets requests (kTaken): the caller delivers them.
ShmEndpoint::Moved ShmEndpoint::poll_one(Lock& lock, Serve serve, Handful* hand) {
  if (events_.any(std::memory_order_relaxed)) take_events();
  if (serve == Serve::kAll) {
    if (backlog_.has_task()) return run_task(lock);
    if (pace_.is_time_for_timers() && timers_.is_due() && run_timers(lock)) {
      return Moved::kSomething;
    }
  }
  bell_->take([&](std::size_t slot) {
    for (ShmRemote* const remote : connections_.of_bit(slot)) backlog_.add_ring(*remote);
  });
  if (watched_.sees()) backlog_.add_ring(*watched_.remote());
  if (pace_.is_time_for_letters()) {
    Moved moved = Moved::kNothing;
    if (backlog_.has_ring()) {
      Handful own;
      do {
        Handful& to = hand ? *hand : own;
        if (take_letters(lock, backlog_.next_ring(), serve, to, hand != nullptr, moved)) {
          return moved;
        }
      } while (backlog_.has_ring());
    }
    if (pace_.letters_came() && backlog_.has_transfer(serve) && letter_comes(lock)) {
      return Moved::kSomething;
    }
  }
  const Moved moved = work_on_transfer(lock, serve, pace_.begin_slice());
  if (moved != Moved::kNothing) return moved;
  if (backlog_.has_ring() || (serve == Serve::kAll && backlog_.has_task())) {
    return Moved::kSomething;
  }
  return serve == Serve::kAll && timers_.is_due() && run_timers(lock) ? Moved::kSomething
                                                                      : Moved::kNothing;
}

// Letters come one after another: the next one goes first, if it comes in a moment. Calls beside a
// large transfer would otherwise wait for a slice each time.
bool ShmEndpoint::letter_comes(Lock& lock) {
  const Watch watched = watched_.watch();
  lock.unlock();
  bool comes = false;
  for (int i = 0; i < kSpinsBeforeSlice && !comes; ++i) {
    cpu_relax();
    comes = watched.sees() || bell_->any();
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
      if (remote.in().reader) entry = remote.in().reader->take(hand.room(), large);
      if (entry.empty()) break;
      PlainLetter& letter = hand.letters[hand.count];
      const bool plain = large.empty() && parse_plain(entry, letter);
      if (!plain || letter.reply == all || (letter.reply && remote.in().joining)) {
        if (hand.count != 0)
          fail(ErrorKind::kInvalidArgument, "a message that changes while it is read");
        alone = parse_letter(entry);
        break;
      }
      hand.add(entry);
      entry = {};
    } while (hand.count < most && hand.has_room() &&
             remote.in().reader->next_is_plain(Handful::kMostBytes, !all));
  } catch (const Error& error) {
    break_off(remote, concat("sent something unusable: ", error.what()));
    entry = {};
  }
  if (entry.empty() && hand.count == 0) {
    backlog_.remove_ring(remote);
    end_burst(remote, /*drained=*/true);
    if (remote.in().is_over()) finish_loss(remote);
    return false;
  }
  count_letters(remote, entry.empty() ? static_cast<int>(hand.count) : 1);
  moved = Moved::kSomething;
  if (entry.empty() && keep) {
    backlog_.keep_hand(hand);
    moved = Moved::kTaken;
  } else if (entry.empty()) {
    moved = deliver_hand(lock, hand);
  } else if (alone.large) {
    start_transfer(remote, entry, alone);
  } else if (all) {
    moved = deliver(lock, remote, alone);
  } else if (alone.reply && !remote.in().joining) {
    ++remote.in().taken;
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
  pace_.count_letters(letters);
  const bool is_busiest = watched_.count_letters(remote, letters);
  if (!remote.in().reader) return;  // it was broken off
  if (is_busiest) set_watched(&remote);
  remote.in().burst += letters;
  if (!remote.in().reader->has_letter() && !remote.in().ending) {
    // Looked at after its bit was cleared: what is written from now on is knocked for, or is seen
    // in the ring that is watched.
    backlog_.remove_ring(remote);
    end_burst(remote, /*drained=*/true);
  } else if (remote.in().burst >= kBurst) {
    backlog_.end_turn(remote);
    end_burst(remote, /*drained=*/false);
  }
}

ShmEndpoint::Moved ShmEndpoint::arrive(ShmRemote& remote, const PlainLetter& letter) {
  return arrive(remote, Arrival{letter.kind, letter.reply, letter.head(), {}});
}

ShmEndpoint::Moved ShmEndpoint::deliver_hand(Lock& lock, Handful& hand) {
  ShmRemote& remote = *hand.remote;
  const bool replies = hand.letters[0].reply;
  if (replies) remote.in().taken += hand.count;
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
  remote.in().delivered.fetch_add(replies);
  if (!remote.lost_.load()) return;
  {
    const Lock lock(mutex_);
    backlog_.add_ring(remote);
  }
  bell_.ring_service_once();
}

void Backlog::take_over_hand() {
  Handful* const hand = std::exchange(hand_, nullptr);
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
  if (remote.in().reader && remote.in().reader->writer_is_blocked(drained))
    remote.bell_->knock(false);
  if (remote.look_at_sent()) push_task({.type = Task::Type::kRoom, .remote = &remote});
  if (!remote.in().stalled.empty()) [[unlikely]]
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
