#include "coll/mail.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/loop.h"
#include "base/thread.h"
#include "coll/engine.h"

namespace convoy::coll {
namespace {

constexpr std::chrono::milliseconds kAwake(1);
// Of one sleep: whoever sends rings, unless somebody has overwritten the word that says who sleeps.
constexpr std::chrono::milliseconds kLongSleep(500);
constexpr int kShortWait = 200;
// What may wait to be received.
constexpr std::size_t kMostUnexpected = std::size_t{1} << 30;

}  // namespace

Mail::Mail(Engine& engine, std::function<std::shared_ptr<void>()> keep)
    : engine_(engine),
      keep_(std::move(keep)),
      rank_(engine.rank()),
      size_(engine.size()),
      peers_(static_cast<std::size_t>(engine.size())) {}

Mail::~Mail() { close(); }

std::string Mail::describe(const Transfer& transfer) const {
  return concat(
      transfer.sends ? "send of " : "recv of ", describe_elements(transfer.bytes, transfer.type),
      transfer.sends ? " to " : " from ",
      transfer.peer < 0 ? "any rank" : concat("rank ", transfer.peer), ", tag ", transfer.tag,
      ", group \"", engine_.name(), "\", rank ", rank_, " of ", size_, ": ");
}

std::exception_ptr Mail::error(const Transfer& transfer, ErrorKind kind,
                               const std::string& text) const {
  return std::make_exception_ptr(Error(kind, describe(transfer) + text));
}

// --- the public side ---

bool Mail::try_send(const Transfer& send) {
  if (send.bytes > Letter::kBodyBytes || send.peer == rank_) return false;
  const Lock lock(mutex_);
  const Peer& peer = peers_[static_cast<std::size_t>(send.peer)];
  if (stopped_ || engine_.troubled() || !peer.outgoing.empty() || !peer.answers.empty() ||
      !has_room(send.peer)) {
    return false;
  }
  mark_used();
  write(send.peer, {send.tag, send.bytes, send.type, Letter::Kind::kInline},
        {send.data, send.bytes});
  return true;
}

bool Mail::try_receive(Transfer& receive) {
  if (receive.peer < 0 || receive.peer == rank_ || receive.bytes > Letter::kBodyBytes) return false;
  const Lock lock(mutex_);
  Peer& peer = peers_[static_cast<std::size_t>(receive.peer)];
  if (stopped_ || !peer.unexpected.empty() || !receives_.empty()) return false;
  mark_used();
  // Waits a little for the next letter of this rank, and takes it if it is the one.
  const std::uint64_t number = peer.taken + 1;
  const Letter& letter = engine_.layout_.channel(engine_.base_, receive.peer, rank_).letter(number);
  for (int i = 0; i < std::min(engine_.policy_.spins, kShortWait); ++i) {
    if (letter.number.load(std::memory_order_acquire) != number) {
      cpu_relax();
      continue;
    }
    const Letter::Header& header = letter.header;
    if (header.kind != Letter::Kind::kInline || header.tag != receive.tag ||
        header.type != receive.type || header.bytes != receive.bytes) {
      return false;
    }
    std::memcpy(receive.data, letter.body.data(), receive.bytes);
    receive.source = receive.peer;
    took(receive.peer, number);
    return true;
  }
  return false;
}

void Mail::mark_used() {
  auto& used = engine_.head(rank_).mail_used;
  if (used.load(std::memory_order_relaxed) == 0) used.store(1, std::memory_order_release);
}

void Mail::run(std::span<Transfer> transfers) {
  Lock lock(mutex_);
  // Done for this side, and what it has to tell the others is on its way: nobody may come by later.
  const auto all_done = [&] {
    return std::all_of(transfers.begin(), transfers.end(), [&](const Transfer& transfer) {
      if (!transfer.done) return false;
      return transfer.source < 0 || transfer.deadline.expired() ||
             peers_[static_cast<std::size_t>(transfer.source)].answers.empty();
    });
  };
  try {
    for (Transfer& transfer : transfers) post(transfer);
    ring(rank_);  // another thread of this rank may wait for what has just been done
    wait_for(lock, Deadline::never(), engine_.policy_.spins, all_done);
  } catch (...) {
    // Memory ran out, for example: no list may keep these.
    if (!lock.owns_lock()) lock.lock();
    fail_all(std::current_exception());
    throw;
  }
  for (const Transfer& transfer : transfers) {
    if (transfer.error) std::rethrow_exception(transfer.error);
  }
}

void Mail::start(std::span<const std::shared_ptr<Transfer>> transfers) {
  {
    Lock lock(mutex_);
    start_worker();  // first: nothing is sent or expected yet if this throws
    for (const auto& transfer : transfers) {
      transfer->self = transfer;
      ++asynchronous_;
      post(*transfer);
    }
    progress();
    ring(rank_);  // the worker may sleep for the sake of others
    callbacks_.run(lock);
  }
  started_.notify_all();
}

bool Mail::wait(const Transfer& transfer, const Deadline& deadline) {
  Lock lock(mutex_);
  if (!wait_for(lock, deadline, engine_.policy_.spins, [&] { return transfer.done; })) return false;
  if (transfer.error) std::rethrow_exception(transfer.error);
  return true;
}

bool Mail::is_done(const Transfer& transfer) {
  Lock lock(mutex_);
  if (!transfer.done) progress();
  const bool done = transfer.done;
  callbacks_.run(lock);
  return done;
}

void Mail::settle() {
  Lock lock(mutex_);
  check_trouble();
  callbacks_.run(lock);
}

void Mail::close() {
  {
    Lock lock(mutex_);
    closing_ = true;
    if (!stopped_) {
      fail_all(std::make_exception_ptr(
          Error(ErrorKind::kPeerLost, concat("group \"", engine_.name(), "\", rank ", rank_, " of ",
                                             size_, ": the group was closed on this rank"))));
    }
    callbacks_.run(lock);
  }
  ring_anyway(engine_.head(rank_).mail);
  started_.notify_all();
  end_thread(worker_);
}

// --- waiting ---

// Moves messages along until done() is true; the lock is given away between looks.
template <class Done>
bool Mail::wait_for(Lock& lock, const Deadline& deadline, int spins, const Done& done) {
  const auto look = [&] {
    const bool moved = progress();
    if (unexpected_bytes_ > kMostUnexpected && !stopped_) {
      break_group(ErrorKind::kResource, concat("rank ", rank_, " keeps ", unexpected_bytes_ >> 20,
                                               " MiB of messages that it has not received"));
    }
    if (!moved && engine_.troubled()) check_trouble();
    if (moved) ring(rank_);  // another thread's transfer may be done
    callbacks_.run(lock);
    return moved;
  };
  const auto finished = [&] {
    if (!done()) return false;
    callbacks_.run(lock);  // whoever finds it done may be the last to come by
    return true;
  };
  for (int idle = 0;;) {
    if (finished()) return true;
    if (look()) {
      idle = 0;
      continue;
    }
    if (finished()) return true;
    ++idle;
    if (idle < spins) {
      lock.unlock();
      cpu_relax();
      lock.lock();
      continue;
    }
    if (idle < spins + engine_.policy_.yields) {
      lock.unlock();
      yield_cpu();
      lock.lock();
      continue;
    }
    if (const Announcement here(engine_.head(rank_).mail); !look() && !done()) {
      const Deadline until = std::min({deadline, next_deadline(), Deadline::after(kLongSleep)});
      // Trouble that does not concern what is waited for may do so soon; and a receiver does not
      // ring for every letter that it takes out of a full ring.
      const bool awake = engine_.troubled() || has_backlog();
      lock.unlock();
      here.sleep(awake ? std::min(until, Deadline::after(kAwake)) : until);
      lock.lock();
    }
    if (finished()) return true;
    check_deadlines();
    callbacks_.run(lock);
    if (!done() && deadline.expired()) return false;
  }
}

void Mail::start_worker() {
  if (worker_.joinable() || closing_) return;
  worker_ = start_thread([this, alive = keep_()] { work(); });
}

// For asynchronous transfers, whether or not somebody waits for them. Does not spin: who is in a
// hurry waits.
void Mail::work() {
  set_thread_name("convoy-mail");
  Lock lock(mutex_);
  while (!closing_) {
    const auto idle = [&] { return asynchronous_ == 0 && !has_answers(); };
    started_.wait(lock, [&] { return closing_ || !idle(); });
    if (closing_) return;
    try {
      wait_for(lock, Deadline::never(), 0, [&] { return closing_ || idle(); });
    } catch (...) {
      // Memory ran out, for example: those who wait are told.
      if (!lock.owns_lock()) lock.lock();
      fail_all(std::current_exception());
    }
  }
}

bool Mail::has_answers() const {
  return std::any_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return !peer.answers.empty(); });
}

bool Mail::has_backlog() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
    return !peer.answers.empty() || !peer.outgoing.empty() ||
           std::any_of(peer.arriving.begin(), peer.arriving.end(),
                       [](const Arriving& one) { return !one.from; });
  });
}

Deadline Mail::next_deadline() const {
  Deadline next = Deadline::never();
  for (const Transfer* transfer : pending_) next = std::min(next, transfer->deadline);
  return next;
}

// --- beginning and end of a transfer ---

void Mail::post(Transfer& transfer) {
  mark_used();
  if (!stopped_ && engine_.troubled()) check_trouble();
  transfer.place = pending_.insert(pending_.end(), &transfer);
  if (stopped_) return finish(transfer, stopped_);
  if (transfer.sends && engine_.head(transfer.peer).left.load(std::memory_order_acquire) != 0) {
    return finish(transfer,
                  error(transfer, ErrorKind::kPeerLost, engine_.describe_gone(transfer.peer)));
  }
  if (!transfer.sends) {
    if (!deliver_unexpected(transfer)) receives_.push_back(&transfer);
    return;
  }
  if (transfer.peer != rank_) {
    peers_[static_cast<std::size_t>(transfer.peer)].outgoing.push_back(&transfer);
    write_letters(transfer.peer);
    return;
  }
  // To itself: kept until it is asked for, so that it is done at once.
  Received letter{0, {transfer.tag, transfer.bytes, transfer.type, Letter::Kind::kPayload}, {}, {}};
  receive_letter(rank_, std::move(letter), transfer.data);
  finish(transfer);
}

void Mail::finish(Transfer& transfer, const std::exception_ptr& failure) {
  const auto keep = std::move(transfer.self);  // from now on a Work, if anyone, has it
  if (keep) --asynchronous_;
  transfer.done = true;
  transfer.error = failure;
  pending_.erase(transfer.place);
  callbacks_.add(transfer);
}

// --- failing ---

void Mail::fail_all(const std::exception_ptr& why) {
  // Peers may still look at what is theirs to copy.
  auto& fabric = shm::Fabric::instance();
  const auto released = engine_.all_gave_up();
  for (Peer& peer : peers_) {
    for (const auto& [number, send] : peer.unanswered) {
      const auto place =
          send->bounce ? send->bounce.location() : fabric.locate(send->data, send->bytes);
      if (place) engine_.mesh_->quarantine(place, released);
      send->bounce = {};
    }
    peer = Peer{};
  }
  receives_.clear();
  stopped_ = why;
  engine_.head(rank_).mail_stopped.store(1, std::memory_order_release);
  while (!pending_.empty()) finish(*pending_.front(), why);
}

void Mail::break_group(ErrorKind kind, const std::string& cause) {
  // Not the collective under way: it may not need what is missing here, and all survivors must
  // agree on whether it completed. It finds out by itself.
  const std::uint64_t next = engine_.started_.load(std::memory_order_acquire) + 1;
  engine_.record_failure(next, kind, cause);
  check_trouble();
}

// The group is broken, this rank leaves, or another one is gone. What was sent before counts: all
// letters have just been looked at.
void Mail::check_trouble() {
  if (stopped_) return;
  if (engine_.broken()) {
    const auto [kind, cause] = engine_.recorded_cause();
    return fail_all(std::make_exception_ptr(
        Error(kind, concat("message, group \"", engine_.name(), "\", rank ", rank_, " of ", size_,
                           ": ", cause, "; the group is broken: make a new one"))));
  }
  int left = 0;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    if (engine_.head(r).left.load(std::memory_order_acquire) == 0) {
      if (!engine_.mesh_->loss(r)) continue;
      return break_group(ErrorKind::kPeerLost,
                         concat(engine_.describe_gone(r), "; read rank ", r, "'s log first"));
    }
    // Who leaves, and may end after that, harms only those who want something of it.
    ++left;
    // What it sent before it left has been taken out by now, if this look began after.
    take_letters(r);
    fail_those_with(
        r, std::make_exception_ptr(Error(
               ErrorKind::kPeerLost, concat("message, group \"", engine_.name(), "\", rank ", rank_,
                                            " of ", size_, ": ", engine_.describe_gone(r)))));
  }
  if (left == size_ - 1) {
    fail_those_with(-1, std::make_exception_ptr(Error(
                            ErrorKind::kPeerLost,
                            concat("recv from any rank, group \"", engine_.name(), "\", rank ",
                                   rank_, " of ", size_, ": all other ranks have left"))));
  }
}

// Fails what needs a rank that has left.
void Mail::fail_those_with(int rank, const std::exception_ptr& why) {
  std::vector<Transfer*> lost;
  for (auto it = receives_.begin(); it != receives_.end();) {
    if ((*it)->peer == rank) {
      lost.push_back(*it);
      it = receives_.erase(it);
    } else {
      ++it;
    }
  }
  if (rank >= 0) {
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    for (Transfer* send : peer.outgoing) lost.push_back(send);
    peer.outgoing.clear();
    peer.answers.clear();
    auto& fabric = shm::Fabric::instance();
    for (const auto& [number, send] : peer.unanswered) {
      lost.push_back(send);
      const auto place =
          send->bounce ? send->bounce.location() : fabric.locate(send->data, send->bytes);
      if (place) engine_.mesh_->quarantine(place, engine_.all_gave_up());
      send->bounce = {};
    }
    peer.unanswered.clear();
    for (const Arriving& message : peer.arriving) lost.push_back(message.receive);
    peer.arriving.clear();
  }
  for (Transfer* transfer : lost) finish(*transfer, why);
}

void Mail::check_deadlines() {
  for (const Transfer* transfer : pending_) {
    if (!transfer->deadline.expired()) continue;
    const int peer = transfer->peer;
    return break_group(ErrorKind::kTimeout,
                       concat(describe(*transfer), "Timed out waiting; ",
                              peer < 0 ? std::string("no rank has sent it")
                                       : engine_.describe_late(peer, "has not done its part")));
  }
}

}  // namespace convoy::coll
