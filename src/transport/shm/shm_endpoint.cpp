// The shared-memory endpoint: its making and its end, time, memory. What it does elsewhere:
//   shm_connections.cpp  who is connected; what the watch thread tells
//   shm_threads.cpp      who polls, who sleeps, who is woken
//   shm_remote.cpp       what is sent
//   shm_arrivals.cpp     what arrives
//   shm_transfers.cpp    large letters that arrive
//   shm_losses.cpp       what is lost
#include "transport/shm/shm_endpoint.h"

#include <algorithm>
#include <set>

#include "base/error.h"
#include "base/loop.h"
#include "os/machine.h"
#include "transport/shm/shm_endpoint_impl.h"

namespace convoy::shm {

using transport::Address;

namespace {

constexpr int kLetterSpins = 2000;
constexpr std::uint64_t kLetterReserve = std::uint64_t{256} << 20;

// Spinning keeps the awaited thread off the only core.
int letter_spins() { return usable_cores() > 1 ? kLetterSpins : 0; }

}  // namespace

ShmEndpoint::ShmEndpoint(transport::Inbox& inbox, const ShmEndpointOptions& options)
    : inbox_(inbox),
      options_(options),
      fabric_(Fabric::instance()),
      address_{Id::random(), fabric_.self().encode()},
      probe_(random_u64()),
      spins_(letter_spins()) {
  if (options.descriptors) {
    descriptors_ = std::make_unique<Descriptors>();
    bell_.wake_by(descriptors_->waker());
  }
  heap_.lock()->arena.emplace(
      Arena::Hooks{.next_id = [next = SegmentId{1}]() mutable { return next++; },
                   .added = [](SegmentId, const Segment&) {},
                   .removed = [](SegmentId) {},  // see trim()
                   .headroom =
                       [] {
                         const std::uint64_t left = memory_state().headroom();
                         return left - std::min(left, kLetterReserve);
                       }});
  if (options.service_thread) servants_.start([this](std::uint64_t turn) { serve(turn); });
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
  for (const auto& [id, remote] : connections_.remotes()) {
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
  for (const auto& [id, remote] : connections_.remotes()) {
    if (remote->writer_) remote->writer_.layout().revoked.store(1);
    for (Loan& loan : remote->loans_.all()) {
      if (loan.on_sent) loan.on_sent(&closed);
    }
  }
  const auto tell = [&](SentList& sent) {
    for (auto& [on_sent, received] : sent) on_sent(received ? nullptr : &closed);
  };
  for (Task& task : backlog_.tasks()) tell(task.sent);
  for (Event& event : events_.take()) tell(event.sent);
}

void ShmEndpoint::require_home() const {
  if (home_.is_here()) return;
  fail(ErrorKind::kUnsupported,
       "an endpoint cannot be used in a forked child of the process that made it: its threads and "
       "connections do not survive fork");
}

// --- time ---

transport::Endpoint::TimerId ShmEndpoint::call_at(Clock::time_point when,
                                                  std::function<void()> function) {
  require_home();
  const TimerId id = timers_.add(when, std::move(function));
  // The thread that serves may sleep longer than that.
  bell_.ring_service();
  return id;
}

bool ShmEndpoint::cancel(TimerId id) {
  require_home();
  return timers_.cancel(id);
}

bool ShmEndpoint::run_timers(Lock& lock) {
  const std::function<void()> function = timers_.take_due();
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
  for (const auto& [id, remote] : connections_.remotes()) {
    if (!remote->in().told) ++stats.remotes;
    const std::scoped_lock send_lock(remote->send_mutex_);
    remote->collect();
    stats.lent_bytes += remote->loans_.lent_bytes();
  }
  auto heap = heap_.lock();
  heap->sweep();
  stats.heap_bytes = heap->arena->mapped_bytes();
  for (const LentHeap::Limbo& limbo : heap->limbo) stats.limbo_loans += limbo.blocks.size();
  return stats;
}

Descriptors& ShmEndpoint::descriptors() {
  require_home();
  if (!descriptors_) {
    fail(ErrorKind::kInvalidArgument,
         "this endpoint waits for no descriptors: make it with ShmEndpointOptions::descriptors");
  }
  return *descriptors_;
}

std::size_t ShmEndpoint::trim() {
  require_home();
  const Lock lock(mutex_);
  std::set<SegmentId> after;
  std::size_t bytes = 0;
  for (const auto& [id, remote] : connections_.remotes()) {
    const std::scoped_lock send_lock(remote->send_mutex_);
    remote->collect();
  }
  {
    auto heap = heap_.lock();
    heap->sweep();
    bytes = heap->arena->trim();
    heap->arena->for_each_segment([&](SegmentId id, const Segment&) { after.insert(id); });
  }
  for (const auto& [id, known] : connections_.remotes()) {
    ShmRemote& remote = *known;
    const std::scoped_lock send_lock(remote.send_mutex_);
    std::erase_if(remote.passed_, [&](SegmentId segment) {
      if (after.contains(segment) || remote.links_.empty()) return false;
      remote.links_[0].peer->try_note(static_cast<std::uint64_t>(NoteType::kDrop), 0, -1,
                                      note_id(segment));
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
  void begin_attention(Attention& attention) noexcept override {
    endpoint_->begin_attention(attention);
  }
  void end_attention(Attention& attention) noexcept override {
    endpoint_->end_attention(attention);
  }
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

std::uint64_t shm_watch(transport::Endpoint& endpoint, int fd, std::uint32_t events,
                        std::function<void(std::uint32_t)> ready) {
  auto& shm = dynamic_cast<ShmEndpointHandle&>(endpoint).endpoint();
  return shm.descriptors().add(fd, events, std::move(ready));
}

bool shm_unwatch(transport::Endpoint& endpoint, std::uint64_t id) {
  return dynamic_cast<ShmEndpointHandle&>(endpoint).endpoint().descriptors().remove(id);
}

std::size_t shm_trim(transport::Endpoint& endpoint) {
  return dynamic_cast<ShmEndpointHandle&>(endpoint).endpoint().trim();
}

}  // namespace convoy::shm
