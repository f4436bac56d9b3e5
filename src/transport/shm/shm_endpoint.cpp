// The shared-memory endpoint: connections, threads and time. What arrives is in shm_arrivals.cpp,
// what is sent in shm_remote.cpp.
#include "transport/shm/shm_endpoint.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/error.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/thread.h"
#include "os/machine.h"
#include "transport/shm/shm_endpoint_impl.h"

namespace convoy::shm {

using transport::Address;

namespace {

constexpr int kLetterSpins = 2000;
constexpr std::uint64_t kLetterReserve = std::uint64_t{256} << 20;

// Spinning keeps the awaited thread off the only core.
int letter_spins() { return usable_cores() > 1 ? kLetterSpins : 0; }

// A number in the place of an Id, which notes have room for.
Id id_of(std::uint64_t number) {
  Id id;
  std::memcpy(id.bytes.data(), &number, sizeof number);
  return id;
}

std::uint64_t number_of(const Id& id) {
  std::uint64_t number = 0;
  std::memcpy(&number, id.bytes.data(), sizeof number);
  return number;
}

}  // namespace

class ShmEndpoint::LinkAlarm final : public Alarm {
 public:
  LinkAlarm(ShmEndpoint& owner, const std::shared_ptr<Peer>& peer) : owner_(owner), peer_(peer) {}
  void ring() noexcept override {
    owner_.happen({.type = Event::Type::kLost, .peer = peer_.lock()});
  }

 private:
  ShmEndpoint& owner_;
  const std::weak_ptr<Peer> peer_;
};

ShmEndpoint::ShmEndpoint(transport::Inbox& inbox, const ShmEndpointOptions& options)
    : inbox_(inbox),
      options_(options),
      fabric_(Fabric::instance()),
      address_{Id::random(), fabric_.self().encode()},
      probe_(random_u64()),
      wait_spins_(letter_spins()),
      serve_spins_(letter_spins()) {
  std::tie(control_, control_fd_) = make_mapping(sizeof(Doorbell), "doorbell");
  new (control_->data()) Doorbell{};
  heap_.lock()->arena.emplace(
      Arena::Hooks{.next_id = [next = SegmentId{1}]() mutable { return next++; },
                   .added = [](SegmentId, const Segment&) {},
                   .removed = [](SegmentId) {},  // see trim()
                   .headroom =
                       [] {
                         const std::uint64_t left = memory_state().headroom();
                         return left - std::min(left, kLetterReserve);
                       }});
  if (options.service_thread) start_servants();
  try {
    fabric_.open_door(address_.id,
                      [this](const std::shared_ptr<Peer>& peer, const std::string& text) {
                        const Address from = Address::decode(text);
                        const auto info = ProcessInfo::decode(from.where);
                        if (info.pid != peer->info().pid || info.id != peer->info().id) {
                          fail(ErrorKind::kInvalidArgument, "an address of another process");
                        }
                        happen({.type = Event::Type::kDialed, .peer = peer, .text = text});
                        return notes();
                      });
  } catch (...) {
    stop_servants();
    throw;
  }
}

ShmEndpoint::~ShmEndpoint() {
  fabric_.close_door(address_.id);
  stop_servants();
  std::vector<std::shared_ptr<Peer>> peers;
  for (const auto& [id, remote] : remotes_) {
    for (const auto& link : remote->links_) peers.push_back(link.peer);
  }
  {
    auto events = events_.lock();
    for (const Event& event : *events) {
      if (event.peer) peers.push_back(event.peer);
    }
  }
  fabric_.hang_up(peers);
  // What the remotes have not read is theirs to read; whoever sent it is told.
  const Error closed(ErrorKind::kPeerLost, "the endpoint was closed");
  for (const auto& [id, remote] : remotes_) {
    if (remote->writer_) remote->writer_.layout().revoked.store(1);
    for (auto& loan : remote->loans_) {
      if (loan.on_sent) loan.on_sent(&closed);
    }
  }
  const auto tell = [&](auto& sent) {
    for (auto& [on_sent, received] : sent) on_sent(received ? nullptr : &closed);
  };
  for (Task& task : tasks_) tell(task.sent);
  auto events = events_.lock();
  for (Event& event : *events) tell(event.sent);
}

void ShmEndpoint::require_home() const {
  if (home_.is_here()) return;
  fail(ErrorKind::kUnsupported,
       "an endpoint cannot be used in a forked child of the process that made it: its threads and "
       "connections do not survive fork");
}

// --- connections ---

void ShmEndpoint::happen(Event event) noexcept {
  events_.lock()->push_back(std::move(event));
  has_events_.store(true);
  // Both: the thread that serves may stand in a call, and what happened may be memory that somebody
  // waits for.
  ring(bell().service);
  ring(bell().waiters, 1);
}

// Descriptors could not be passed: the other side's watch thread is behind.
void ShmEndpoint::retry_soon(ShmRemote& remote) {
  call_at(Clock::now() + std::chrono::milliseconds(1), [this, &remote] {
    const Lock lock(mutex_);
    enqueue(remote);
  });
}

Peer::Notes ShmEndpoint::notes() {
  return [this](Peer& peer, const Frame& frame, UniqueFd fd) {
    happen({.type = Event::Type::kNote,
            .peer = peer.shared_from_this(),
            .frame = frame,
            .fd = std::move(fd)});
  };
}

transport::Remote& ShmEndpoint::remote(const Address& address) {
  require_home();
  {
    const Lock lock(mutex_);
    const auto found = remotes_.find(address.id);
    if (found != remotes_.end()) return *found->second;
    ++dialing_;
  }
  std::shared_ptr<Peer> peer;
  ProcessInfo info;
  try {
    info = ProcessInfo::decode(address.where);
    peer = fabric_.dial(info, address.id, address_.encode(), notes(),
                        Deadline::after(options_.connect_timeout));
  } catch (...) {
    const Lock lock(mutex_);
    --dialing_;
    throw;
  }
  const Lock lock(mutex_);
  const auto found = remotes_.find(address.id);
  // It may have dialed at the same time, or another thread has: then there are two connections, and
  // both are good.
  ShmRemote& remote = found != remotes_.end() ? *found->second : make_remote(address, info);
  attach(remote, peer);
  if (--dialing_ == 0) early_.clear();
  return remote;
}

ShmRemote& ShmEndpoint::make_remote(const Address& address, const ProcessInfo& info) {
  const std::uint32_t number = next_number_++;
  auto& place = remotes_[address.id];
  place = std::make_unique<ShmRemote>(*this, address, info, number);
  slots_[number % Doorbell::kSlots].push_back(place.get());
  return *place;
}

void ShmEndpoint::attach(ShmRemote& remote, const std::shared_ptr<Peer>& peer) {
  if (remote.ending_) return peer->send_bye();
  auto alarm = std::make_shared<LinkAlarm>(*this, peer);
  {
    const std::scoped_lock send_lock(remote.send_mutex_);
    remote.links_.push_back({peer, alarm});
  }
  owners_[peer.get()] = &remote;
  const bool told = peer->try_note(static_cast<std::uint64_t>(NoteType::kBell), control_->size(),
                                   control_fd_.get(), id_of(remote.number_));
  if (!told) break_off(remote, "takes nothing over its connection");
  peer->subscribe(alarm);
  for (Event& event : std::exchange(early_, {})) {
    if (owners_.contains(event.peer.get())) {
      take_event(event);
    } else {
      early_.push_back(std::move(event));
    }
  }
}

void ShmEndpoint::take_events() {
  has_events_.store(false);
  std::vector<Event> events = std::exchange(*events_.lock(), {});
  for (Event& event : events) take_event(event);
}

void ShmEndpoint::take_event(Event& event) {
  if (event.type == Event::Type::kDialed) {
    const Address address = Address::decode(event.text);
    const auto found = remotes_.find(address.id);
    if (found != remotes_.end()) return attach(*found->second, event.peer);
    ShmRemote& remote = make_remote(address, event.peer->info());
    remote.joining_ = true;
    push_task({.type = Task::Type::kJoined, .remote = &remote});
    return attach(remote, event.peer);
  }
  if (event.type == Event::Type::kSent) {
    return push_task(
        {.type = Task::Type::kSent, .remote = event.remote, .sent = std::move(event.sent)});
  }
  if (event.type == Event::Type::kCut) {
    if (!event.text.empty()) return break_off(*event.remote, event.text);
    return lose(*event.remote, Error(ErrorKind::kPeerLost,
                                     concat(event.remote->name(), " was cut off by this process")));
  }
  if (!event.peer) return;
  const auto owner = owners_.find(event.peer.get());
  if (owner == owners_.end()) {
    if (dialing_ != 0) early_.push_back(std::move(event));
    return;
  }
  ShmRemote& remote = *owner->second;
  if (event.type == Event::Type::kLost) {
    const auto why = event.peer->loss();
    return lose(remote,
                Error(ErrorKind::kPeerLost, concat(remote.name(), " ", why ? *why : "is lost")));
  }
  try {
    take_note(remote, event);
  } catch (const Error& error) {
    break_off(remote, concat("sent something unusable: ", error.what()));
  }
}

void ShmEndpoint::take_note(ShmRemote& remote, Event& event) {
  const std::uint64_t number = number_of(event.frame.process);
  const std::size_t bytes = event.frame.bytes;
  const auto type = static_cast<NoteType>(event.frame.segment);
  if (type != NoteType::kDrop && !event.fd) {
    fail(ErrorKind::kInvalidArgument, "a note without its memory");
  }
  if (type == NoteType::kBell) {
    if (remote.bell_->bell.load(std::memory_order_relaxed)) return;  // by the other connection
    const Mapping mapping = adopt_mapping(std::move(event.fd), bytes);
    auto* const bell = reinterpret_cast<Doorbell*>(mapping->data());
    if (mapping->size() < sizeof(Doorbell) || bell->magic != Doorbell::kMagic) {
      fail(ErrorKind::kInvalidArgument, "memory that is no doorbell of this version");
    }
    remote.bell_->mapping = mapping;
    remote.bell_->number = static_cast<std::uint32_t>(number);
    remote.bell_->bell.store(bell, std::memory_order_release);
    // For what was written before the bell was known.
    remote.bell_->knock(true);
    remote.bell_->knock(false);
  } else if (type == NoteType::kRing) {
    if (remote.reader_ || remote.ending_) {
      fail(ErrorKind::kInvalidArgument, "a second ring of letters");
    }
    remote.reader_ = std::make_shared<RingReader>(adopt_mapping(std::move(event.fd), bytes));
    remote.probe();
    enqueue(remote);
  } else if (type == NoteType::kSegment) {
    auto& segment = remote.segments_[number];
    if (segment.bytes != 0) fail(ErrorKind::kInvalidArgument, "a second segment ", number);
    if (remote.segments_.size() > 4096) fail(ErrorKind::kInvalidArgument, "too many segments");
    segment.fd = std::move(event.fd);
    segment.bytes = bytes;
    retry_stalled(remote);
  } else if (type == NoteType::kDrop) {
    remote.segments_.erase(number);
  } else {
    fail(ErrorKind::kInvalidArgument, "a note of unknown type ", event.frame.segment);
  }
}

// --- threads ---

namespace {

// Which endpoint's serving thread this is, and its turn.
struct Serving {
  const void* endpoint = nullptr;
  std::uint64_t turn = 0;
};
thread_local Serving serving_here;

// This thread has woken somebody by a system call since it last waited.
thread_local bool has_woken = false;

// A sleep that was no longer than this, two wake-ups included, would have been a short spin.
constexpr auto kShortSleep = std::chrono::microseconds(200);
// How often one looks who lingers, and after how many looks in vain it ends.
constexpr auto kMoment = std::chrono::microseconds(100);
constexpr int kQuietMoments = 3;
// What it takes at most of what comes meanwhile.
constexpr int kInPassing = 64;
// So many times in a row somebody was in wait() without a sleep.
constexpr unsigned kWaitsUntilLingering = 16;

// The thread that is waited for may be on this core's queue: it was woken by this one, perhaps.
void relax(int spin) noexcept {
  constexpr int kYieldEvery = 64;
  if (spin % kYieldEvery == kYieldEvery - 1) {
    yield_cpu();
  } else {
    cpu_relax();
  }
}

Deadline earlier(const Deadline& a, const Deadline& b) {
  return a.is_never() || (!b.is_never() && b.when() < a.when()) ? b : a;
}

}  // namespace

void note_woken() noexcept { has_woken = true; }

bool ShmEndpoint::timer_is_due() const noexcept {
  const std::int64_t next = next_timer_.load(std::memory_order_relaxed);
  return next != INT64_MAX && Clock::now().time_since_epoch().count() >= next;
}

bool ShmEndpoint::something(Serve serve) const noexcept {
  if (bell().any() || has_events_.load() || ready_count_.load() != 0 ||
      transfer_count_[1].load() != 0) {
    return true;
  }
  return serve == Serve::kAll && (task_count_.load() != 0 || transfer_count_[0].load() != 0);
}

// Rings are looked at by whoever waits; the thread that serves does so when nobody does.
bool ShmEndpoint::for_service() const noexcept {
  if (task_count_.load() != 0 || transfer_count_[0].load() != 0) return true;
  return !is_attended() && something(Serve::kReplies);
}

// --- those who serve ---

void ShmEndpoint::start_servants() {
  auto servants = servants_.lock();
  servants->threads.push_back(start_thread([this] {
    serve(1);
    be_servant();
  }));
}

void ShmEndpoint::stop_servants() noexcept {
  stopping_.store(true);
  ring(bell().service);
  std::vector<std::thread> threads;
  {
    auto servants = servants_.lock();
    servants->stop = true;
    threads.swap(servants->threads);
  }
  servants_.notify();
  for (std::thread& thread : threads) thread.join();
}

bool ShmEndpoint::has_turn(std::uint64_t turn) const noexcept {
  return !stopping_.load() && turn_.load(std::memory_order_relaxed) == turn;
}

// Waits for a turn that was handed over, again and again.
void ShmEndpoint::be_servant() {
  for (;;) {
    std::uint64_t turn = 0;
    {
      auto servants = servants_.lock();
      ++servants->idle;
      servants.wait(Deadline::never(), [&] { return servants->stop || !servants->taken; });
      --servants->idle;
      if (servants->stop) return;
      servants->taken = true;
      turn = servants->turn;
    }
    serve(turn);
  }
}

void ShmEndpoint::hand_over() noexcept {
  if (!home_.is_here() || !options_.service_thread) return;
  {
    auto servants = servants_.lock();
    // One that was handed over and not taken yet is enough.
    if (servants->stop || !servants->taken) return;
    if (servants->idle == 0) {
      try {
        servants->threads.push_back(start_thread([this] { be_servant(); }));
      } catch (const std::exception& error) {
        // This thread goes on serving when its call returns.
        log_warn("an endpoint could not hand over to another thread: ", error.what());
        return;
      }
    }
    servants->taken = false;
    turn_.store(++servants->turn);
  }
  servants_.notify();
  // If it was idle after all.
  ring(bell().service);
}

// While threads come to wait() again and again, each of them only for a moment, nobody has to be
// woken for a reply that comes in between: the thread that serves *lingers*, which is to sleep for
// a moment at a time and to look.
void ShmEndpoint::begin_to_linger() noexcept {
  if (!linger_asked_.exchange(false)) return;
  visits_seen_ = visits_.load(std::memory_order_relaxed);
  quiet_ = 0;
  bell().lingers.exchange(1);
  lingering_.store(true);
}

void ShmEndpoint::end_lingering() noexcept {
  const std::uint64_t visits = visits_.load(std::memory_order_relaxed);
  quiet_ = visits_seen_.exchange(visits) == visits ? quiet_ + 1 : 0;
  if (quiet_ < kQuietMoments) return;
  lingering_.store(false);
  if (inside_.load() != 0) {  // somebody counts on it
    lingering_.store(true);
    return;
  }
  quick_waits_.store(0, std::memory_order_relaxed);
  bell().lingers.exchange(0);
}

void ShmEndpoint::serve(std::uint64_t turn) {
  set_thread_name("convoy-letters");
  serving_here = {this, turn};
  constexpr int kTimersEvery = 64;
  Watch watched;
  const auto sees = [&] {
    return watched.sees() || bell().watched.load(std::memory_order_relaxed) != watched.number;
  };
  while (has_turn(turn)) {
    bool worked = false;
    // Who lingers while others come by takes some of what they have left, or they would not come.
    int left = lingering_.load(std::memory_order_relaxed) && quiet_ == 0 ? kInPassing : INT_MAX;
    while (((!is_attended() && sees()) || for_service() || timer_is_due()) && left-- > 0 &&
           has_turn(turn)) {
      Lock lock(mutex_);
      if (watched.number != bell().watched.load()) {
        watched = {watched_ring_, watched_ ? watched_->number_ + 1 : 0};
      }
      const Moved moved = poll_one(lock, Serve::kAll);
      worked |= moved != Moved::kNothing;
      if (moved == Moved::kReply) wake();
    }
    begin_to_linger();
    const bool lingers = lingering_.load(std::memory_order_relaxed);
    const int spins = worked && !lingers && !is_attended() ? serve_spins_.spins() : 0;
    bool came = false;
    for (int i = 0; i < spins && !came; ++i) {
      relax(i);
      came = sees() || something(Serve::kAll) || (i % kTimersEvery == 0 && timer_is_due()) ||
             !has_turn(turn);
    }
    if (came) {
      serve_spins_.paid();
      continue;
    }
    if (spins != 0) serve_spins_.in_vain();
    watched = {};
    const Doorbell::Nap here(bell().service);
    bool idle = false;
    {
      const Lock lock(mutex_);  // nobody has a letter in his hand
      idle = has_turn(turn) && (left < 0 || (!for_service() && (is_attended() || !sees_watched())));
    }
    if (!idle) continue;
    const auto start = Clock::now();
    if (lingers) {
      here.sleep(earlier(next_timer(), Deadline::at(start + kMoment)));
      end_lingering();
    } else {
      here.sleep(next_timer());
      if (Clock::now() - start < kShortSleep) serve_spins_.paid();
    }
  }
  serving_here = {};
}

bool ShmEndpoint::poll(Serve serve) {
  require_home();
  constexpr int kMostAtOnce = 64;
  bool moved = false;
  const auto look = [&] {
    return something(serve) || bell().watched.load() != 0 ||
           (serve == Serve::kAll && timer_is_due());
  };
  for (int i = 0; i < kMostAtOnce && look(); ++i) {
    Lock lock(mutex_);
    const Moved what = poll_one(lock, serve);
    if (what == Moved::kNothing) break;
    if (what == Moved::kReply) wake();
    moved = true;
  }
  if (something(Serve::kReplies)) bell().rouse(true, rung_);
  return moved;
}

// A thread in wait() that looks at the doorbell and the watched ring. Senders are told so, unless
// the thread that serves lingers: then they need not know.
class ShmEndpoint::Attendance {
 public:
  Attendance(ShmEndpoint& endpoint) : endpoint_(endpoint) { enter(); }
  Attendance(const Attendance&) = delete;
  Attendance& operator=(const Attendance&) = delete;
  ~Attendance() { endpoint_.leave_wait(*this); }

  void enter() noexcept {
    endpoint_.visits_.store(endpoint_.visits_.load(std::memory_order_relaxed) + 1,
                            std::memory_order_relaxed);
    if (endpoint_.lingering_.load()) {
      endpoint_.inside_.fetch_add(1);
      counts_on_lingering_ = endpoint_.lingering_.load();
      if (counts_on_lingering_) return;
      endpoint_.inside_.fetch_sub(1);
    }
    counts_on_lingering_ = false;
    endpoint_.bell().awake.fetch_add(1);
  }
  // True: somebody else is sure to look at what this thread has not seen.
  bool leave() noexcept {
    (counts_on_lingering_ ? endpoint_.inside_ : endpoint_.bell().awake).fetch_sub(1);
    return counts_on_lingering_;
  }

  Watch watched;
  bool completed = false;  // a reply, which others may wait for
  bool quick = false;      // did not sleep

 private:
  ShmEndpoint& endpoint_;
  bool counts_on_lingering_ = false;
};

// What this thread would have looked at next is somebody else's now.
void ShmEndpoint::leave_wait(Attendance& attendance) noexcept {
  const bool covered = attendance.leave();
  if (attendance.completed) wake();
  if (covered) return;
  bool more = something(Serve::kReplies) || attendance.watched.sees();
  if (!more && bell().watched.load() != attendance.watched.number) {
    const Lock lock(mutex_);
    more = sees_watched();
  }
  if (more) bell().rouse(true, rung_);
  if (!attendance.quick || !options_.service_thread) {
    quick_waits_.store(0, std::memory_order_relaxed);
  } else if (quick_waits_.fetch_add(1, std::memory_order_relaxed) + 1 == kWaitsUntilLingering) {
    linger_asked_.store(true);
    ring_service();
  }
}

bool ShmEndpoint::wait(const Deadline& deadline, FunctionRef<bool()> ready) {
  require_home();
  if (ready()) return true;
  Attendance here(*this);
  constexpr int kClockEvery = 256;
  for (;;) {
    // Who had to be woken will not answer soon.
    const int spins = std::exchange(has_woken, false) ? 0 : wait_spins_.spins();
    for (int i = 0;; ++i) {
      if (here.watched.sees() || something(Serve::kReplies) ||
          bell().watched.load(std::memory_order_relaxed) != here.watched.number) {
        Lock lock(mutex_, std::try_to_lock);
        if (lock.owns_lock()) {
          if (here.watched.number != bell().watched.load(std::memory_order_relaxed)) {
            here.watched = {watched_ring_, watched_ ? watched_->number_ + 1 : 0};
          }
          const Moved moved = poll_one(lock, Serve::kReplies);
          if (moved != Moved::kNothing) i = 0;
          here.completed |= moved == Moved::kReply;
        }
      }
      if (ready()) {
        if (spins != 0) wait_spins_.paid();
        here.quick = spins != 0;
        return true;
      }
      if (std::exchange(here.completed, false)) wake();
      if (i >= spins) break;
      if (i % kClockEvery == kClockEvery - 1 && deadline.expired()) return ready();
      relax(i);
    }
    if (spins != 0) wait_spins_.in_vain();
    if (serving_here.endpoint == this && has_turn(serving_here.turn)) hand_over();
    bool in_time = true;
    {
      const Doorbell::Nap asleep(bell().waiters);
      here.leave();
      bool idle = false;
      {
        const Lock lock(mutex_);  // nobody has a letter in his hand
        idle = !something(Serve::kReplies) && !sees_watched();
      }
      if (idle && !ready()) {
        const auto start = Clock::now();
        in_time = asleep.sleep(deadline);
        if (Clock::now() - start < kShortSleep) wait_spins_.paid();
      }
      here.enter();
    }
    if (ready()) return true;
    if (!in_time || deadline.expired()) return false;
  }
}

// Senders do not know of it, and whoever serves does so as if it were not there.
bool ShmEndpoint::wait_aside(const Deadline& deadline, FunctionRef<bool()> ready) {
  require_home();
  if (ready()) return true;
  if (serving_here.endpoint == this && has_turn(serving_here.turn)) hand_over();
  for (;;) {
    Announcement here(aside_);
    if (ready()) return true;
    if (!here.sleep(deadline)) return ready();
  }
}

// --- time ---

transport::Endpoint::TimerId ShmEndpoint::call_at(Clock::time_point when,
                                                  std::function<void()> function) {
  require_home();
  TimerId id = 0;
  {
    auto timers = timers_.lock();
    id = timers->next++;
    timers->queue.emplace(std::pair(when, id), std::move(function));
    timers->times[id] = when;
    next_timer_.store(timers->queue.begin()->first.first.time_since_epoch().count());
  }
  // The thread that serves may sleep longer than that.
  ring(bell().service);
  return id;
}

bool ShmEndpoint::cancel(TimerId id) {
  require_home();
  auto timers = timers_.lock();
  const auto found = timers->times.find(id);
  if (found == timers->times.end()) return false;
  timers->queue.erase({found->second, id});
  timers->times.erase(found);
  return true;
}

Deadline ShmEndpoint::next_timer() {
  auto timers = timers_.lock();
  if (timers->queue.empty()) return Deadline::never();
  return Deadline::at(timers->queue.begin()->first.first);
}

bool ShmEndpoint::run_timers(Lock& lock) {
  std::function<void()> function;
  {
    auto timers = timers_.lock();
    const auto next = timers->queue.begin();
    if (next != timers->queue.end() && next->first.first <= Clock::now()) {
      function = std::move(next->second);
      timers->times.erase(next->first.second);
      timers->queue.erase(next);
    }
    next_timer_.store(timers->queue.empty()
                          ? INT64_MAX
                          : timers->queue.begin()->first.first.time_since_epoch().count());
  }
  if (!function) return false;
  lock.unlock();
  function();
  lock.lock();
  return true;
}

// --- the public side ---

ShmEndpointStats ShmEndpoint::stats() {
  require_home();
  ShmEndpointStats stats;
  const Lock lock(mutex_);
  for (const auto& [id, remote] : remotes_) {
    if (!remote->told_) ++stats.remotes;
    const std::scoped_lock send_lock(remote->send_mutex_);
    remote->collect();
    stats.lent_bytes += remote->lent_bytes_;
  }
  auto heap = heap_.lock();
  sweep_limbo(*heap);
  stats.heap_bytes = heap->arena->mapped_bytes();
  for (const Limbo& limbo : heap->limbo) stats.limbo_loans += limbo.blocks.size();
  return stats;
}

std::size_t ShmEndpoint::trim() {
  require_home();
  const Lock lock(mutex_);
  std::set<SegmentId> after;
  std::size_t bytes = 0;
  for (const auto& [id, remote] : remotes_) {
    const std::scoped_lock send_lock(remote->send_mutex_);
    remote->collect();
  }
  {
    auto heap = heap_.lock();
    sweep_limbo(*heap);
    bytes = heap->arena->trim();
    heap->arena->for_each_segment([&](SegmentId id, const Segment&) { after.insert(id); });
  }
  for (const auto& [id, known] : remotes_) {
    ShmRemote& remote = *known;
    const std::scoped_lock send_lock(remote.send_mutex_);
    std::erase_if(remote.passed_, [&](SegmentId segment) {
      if (after.contains(segment) || remote.links_.empty()) return false;
      remote.links_[0].peer->try_note(static_cast<std::uint64_t>(NoteType::kDrop), 0, -1,
                                      id_of(segment));
      return true;
    });
  }
  return bytes;
}

namespace {

// What the user has: in a forked child the endpoint is left as it is, with all that it owns.
class ShmEndpointHandle final : public transport::Endpoint {
 public:
  ShmEndpointHandle(transport::Inbox& inbox, const ShmEndpointOptions& options)
      : endpoint_(new ShmEndpoint(inbox, options), DeleteAtHome()) {}

  const Address& address() const override { return endpoint_->address(); }
  transport::Remote& remote(const Address& address) override { return endpoint_->remote(address); }
  bool poll(Serve serve) override { return endpoint_->poll(serve); }
  bool wait(const Deadline& deadline, FunctionRef<bool()> ready) override {
    return endpoint_->wait(deadline, ready);
  }
  bool wait_aside(const Deadline& deadline, FunctionRef<bool()> ready) override {
    return endpoint_->wait_aside(deadline, ready);
  }
  void wake() noexcept override { endpoint_->wake(); }
  void hand_over() noexcept override { endpoint_->hand_over(); }
  Clock::time_point now() const override { return endpoint_->now(); }
  TimerId call_at(Clock::time_point when, std::function<void()> function) override {
    return endpoint_->call_at(when, std::move(function));
  }
  bool cancel(TimerId id) override { return endpoint_->cancel(id); }

  ShmEndpoint& endpoint() { return *endpoint_; }

 private:
  std::unique_ptr<ShmEndpoint, DeleteAtHome> endpoint_;
};

}  // namespace

std::unique_ptr<transport::Endpoint> make_shm_endpoint(transport::Inbox& inbox,
                                                       const ShmEndpointOptions& options) {
  return std::make_unique<ShmEndpointHandle>(inbox, options);
}

ShmEndpointStats shm_stats(transport::Endpoint& endpoint) {
  return dynamic_cast<ShmEndpointHandle&>(endpoint).endpoint().stats();
}

std::size_t shm_trim(transport::Endpoint& endpoint) {
  return dynamic_cast<ShmEndpointHandle&>(endpoint).endpoint().trim();
}

}  // namespace convoy::shm
