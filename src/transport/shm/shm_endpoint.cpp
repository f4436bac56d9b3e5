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
  if (options.service_thread) {
    service_ = start_thread([this] { serve(); });
  }
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
    stopping_ = true;
    ring(bell().service);
    if (service_.joinable()) service_.join();
    throw;
  }
}

ShmEndpoint::~ShmEndpoint() {
  fabric_.close_door(address_.id);
  stopping_ = true;
  ring(bell().service);
  if (service_.joinable()) service_.join();
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
  const std::size_t slot = next_slot_++ % Doorbell::kSlots;
  auto& place = remotes_[address.id];
  place = std::make_unique<ShmRemote>(*this, address, info, slot);
  slots_[slot].push_back(place.get());
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
                                   control_fd_.get(), id_of(remote.slot_));
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
    remote.bell_->slot = number % Doorbell::kSlots;
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

bool ShmEndpoint::timer_is_due() const noexcept {
  const std::int64_t next = next_timer_.load(std::memory_order_relaxed);
  return next != INT64_MAX && Clock::now().time_since_epoch().count() >= next;
}

bool ShmEndpoint::something(Serve serve) const noexcept {
  if (bell().any() || has_events_.load() || ready_count_.load() != 0 ||
      transfer_count_[1].load() != 0) {
    return true;
  }
  return serve == Serve::kAll &&
         (task_count_.load() != 0 || transfer_count_[0].load() != 0 || timer_is_due());
}

// Rings are looked at by whoever waits; the thread that serves does so when nobody does.
bool ShmEndpoint::for_service() const noexcept {
  if (task_count_.load() != 0 || transfer_count_[0].load() != 0 || timer_is_due()) return true;
  return bell().awake.load() == 0 && something(Serve::kReplies);
}

void ShmEndpoint::serve() {
  set_thread_name("convoy-letters");
  std::shared_ptr<RingReader> hot;
  while (!stopping_.load()) {
    bool worked = false;
    while ((for_service() || (hot && hot->has_letter())) && !stopping_.load()) {
      Lock lock(mutex_);
      worked |= poll_one(lock, Serve::kAll);
      look_at_hot(lock, hot);
    }
    const int spins = worked && bell().awake.load() == 0 ? serve_spins_.spins() : 0;
    bool came = false;
    for (int i = 0; i < spins && !came; ++i) {
      cpu_relax();
      came = (hot && hot->has_letter()) || something(Serve::kAll) || stopping_.load();
    }
    if (came) {
      serve_spins_.paid();
      continue;
    }
    if (spins != 0) serve_spins_.in_vain();
    hot.reset();
    const Announcement here(bell().service);
    bool idle = false;
    {
      const Lock lock(mutex_);  // nobody has a letter in his hand
      idle = !for_service() && !stopping_.load();
    }
    if (idle) here.sleep(next_timer());
  }
}

// Which ring to look at besides the doorbell: a letter is seen there a little earlier.
void ShmEndpoint::look_at_hot(Lock& lock, std::shared_ptr<RingReader>& hot) const {
  if (lock.owns_lock() && hot != hot_) hot = hot_;
}

bool ShmEndpoint::poll(Serve serve) {
  require_home();
  constexpr int kMostAtOnce = 64;
  bool moved = false;
  for (int i = 0; i < kMostAtOnce && something(serve); ++i) {
    Lock lock(mutex_);
    if (!poll_one(lock, serve)) break;
    moved = true;
  }
  if (something(Serve::kReplies)) bell().rouse(true);
  return moved;
}

// What this thread would have looked at next is somebody else's now.
void ShmEndpoint::leave_wait() noexcept {
  bell().awake.fetch_sub(1);
  if (something(Serve::kReplies)) bell().rouse(true);
}

bool ShmEndpoint::wait(const Deadline& deadline, FunctionRef<bool()> ready) {
  require_home();
  if (ready()) return true;
  struct Attendance {
    ShmEndpoint& endpoint;
    explicit Attendance(ShmEndpoint& at) : endpoint(at) { at.bell().awake.fetch_add(1); }
    ~Attendance() { endpoint.leave_wait(); }
  } const attendance(*this);
  constexpr int kClockEvery = 256;
  std::shared_ptr<RingReader> hot;
  if (Lock lock(mutex_, std::try_to_lock); lock.owns_lock()) hot = hot_;
  for (;;) {
    const int spins = wait_spins_.spins();
    for (int i = 0;; ++i) {
      if ((hot && hot->has_letter()) || something(Serve::kReplies)) {
        Lock lock(mutex_, std::try_to_lock);
        if (lock.owns_lock()) {
          if (poll_one(lock, Serve::kReplies)) i = 0;
          look_at_hot(lock, hot);
        }
      }
      if (ready()) {
        if (spins != 0) wait_spins_.paid();
        return true;
      }
      if (i >= spins) break;
      if (i % kClockEvery == kClockEvery - 1 && deadline.expired()) return ready();
      cpu_relax();
    }
    if (spins != 0) wait_spins_.in_vain();
    bool in_time = true;
    {
      const Announcement here(bell().waiters);
      bell().awake.fetch_sub(1);
      bool idle = false;
      {
        const Lock lock(mutex_);  // nobody has a letter in his hand
        idle = !something(Serve::kReplies);
      }
      if (idle && !ready()) in_time = here.sleep(deadline);
      bell().awake.fetch_add(1);
    }
    if (ready()) return true;
    if (!in_time || deadline.expired()) return false;
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
  void wake() noexcept override { endpoint_->wake(); }
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
