// The shared-memory endpoint: who is connected, and what the watch thread tells.
#include <cstring>

#include "base/error.h"
#include "transport/shm/shm_endpoint_impl.h"

namespace convoy::shm {

using transport::Address;

Id note_id(std::uint64_t number) {
  Id id;
  std::memcpy(id.bytes.data(), &number, sizeof number);
  return id;
}

std::uint64_t note_number(const Id& id) {
  std::uint64_t number = 0;
  std::memcpy(&number, id.bytes.data(), sizeof number);
  return number;
}

ShmRemote* Connections::find(const Id& id) const {
  const auto found = remotes_.find(id);
  return found != remotes_.end() ? found->second.get() : nullptr;
}

ShmRemote& Connections::add(ShmEndpoint& owner, const Address& address, const ProcessInfo& info) {
  const std::uint32_t number = next_number_++;
  auto& place = remotes_[address.id];
  place = std::make_unique<ShmRemote>(owner, address, info, number);
  slots_[number % Doorbell::kSlots].push_back(place.get());
  return *place;
}

void Connections::clear_bit(ShmRemote& remote) {
  std::erase(slots_[remote.number() % Doorbell::kSlots], &remote);
}

ShmRemote* Connections::owner(const Peer* peer) const {
  const auto found = owners_.find(peer);
  return found != owners_.end() ? found->second : nullptr;
}

void Connections::end_dialing() {
  if (--dialing_ == 0) early_.clear();
}

void Connections::keep_early(Event event) {
  if (dialing_ != 0) early_.push_back(std::move(event));
}

std::vector<Event> Connections::take_early() {
  std::vector<Event> taken;
  for (Event& event : std::exchange(early_, {})) {
    (owner(event.peer.get()) ? taken : early_).push_back(std::move(event));
  }
  return taken;
}

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

void ShmEndpoint::happen(Event event) noexcept {
  events_.add(std::move(event));
  // Both: the thread that serves may stand in a call, and what happened may be memory that somebody
  // waits for.
  bell_.ring_service();
  ring(bell_->waiters, 1);
}

// Descriptors could not be passed: the other side's watch thread is behind.
void ShmEndpoint::retry_soon(ShmRemote& remote) {
  call_at(Clock::now() + std::chrono::milliseconds(1), [this, &remote] {
    const Lock lock(mutex_);
    backlog_.add_ring(remote);
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
    if (ShmRemote* const known = connections_.find(address.id)) return *known;
    connections_.begin_dialing();
  }
  std::shared_ptr<Peer> peer;
  ProcessInfo info;
  try {
    info = ProcessInfo::decode(address.where);
    peer = fabric_.dial(info, address.id, address_.encode(), notes(),
                        Deadline::after(options_.connect_timeout));
  } catch (...) {
    const Lock lock(mutex_);
    connections_.end_dialing();
    throw;
  }
  const Lock lock(mutex_);
  // It may have dialed at the same time, or another thread has: then there are two connections, and
  // both are good.
  ShmRemote* const known = connections_.find(address.id);
  ShmRemote& remote = known ? *known : connections_.add(*this, address, info);
  attach(remote, peer);
  connections_.end_dialing();
  return remote;
}

void ShmEndpoint::attach(ShmRemote& remote, const std::shared_ptr<Peer>& peer) {
  if (remote.in().ending) return fabric_.forget({peer});
  auto alarm = std::make_shared<LinkAlarm>(*this, peer);
  {
    const std::scoped_lock send_lock(remote.send_mutex_);
    remote.links_.push_back({peer, alarm});
  }
  connections_.set_owner(peer.get(), remote);
  // In this order: whoever knows the doorbell can wake whom it is for.
  const bool told = (!descriptors_ || peer->try_note(static_cast<std::uint64_t>(NoteType::kWaker),
                                                     0, descriptors_->waker())) &&
                    peer->try_note(static_cast<std::uint64_t>(NoteType::kBell), bell_.bytes(),
                                   bell_.fd(), note_id(remote.number()));
  if (!told) break_off(remote, "takes nothing over its connection");
  peer->subscribe(alarm);
  for (Event& event : connections_.take_early()) take_event(event);
}

void ShmEndpoint::take_events() {
  for (Event& event : events_.take()) take_event(event);
}

void ShmEndpoint::take_event(Event& event) {
  if (event.type == Event::Type::kDialed) {
    const Address address = Address::decode(event.text);
    if (ShmRemote* const known = connections_.find(address.id)) return attach(*known, event.peer);
    ShmRemote& remote = connections_.add(*this, address, event.peer->info());
    remote.in().joining = true;
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
  ShmRemote* const owner = connections_.owner(event.peer.get());
  if (!owner) return connections_.keep_early(std::move(event));
  ShmRemote& remote = *owner;
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
  const std::uint64_t number = note_number(event.frame.process);
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
      fail(ErrorKind::kInvalidArgument, "the memory is not a doorbell of this version");
    }
    remote.bell_->mapping = mapping;
    remote.bell_->number = static_cast<std::uint32_t>(number);
    remote.bell_->bell.store(bell, std::memory_order_release);
    // For what was written before the bell was known.
    remote.bell_->knock(true);
    remote.bell_->knock(false);
  } else if (type == NoteType::kWaker) {
    RemoteBell& bell = *remote.bell_;
    if (bell.bell.load(std::memory_order_relaxed) || bell.waker) return;  // by the other connection
    if (!is_waker(event.fd.get()))
      fail(ErrorKind::kInvalidArgument, "the descriptor for waking is not an eventfd");
    bell.waker = std::move(event.fd);
    bell.rung.waker = bell.waker.get();
  } else if (type == NoteType::kRing) {
    if (remote.in().reader || remote.in().ending) {
      fail(ErrorKind::kInvalidArgument, "a second ring of messages");
    }
    remote.in().reader = std::make_shared<RingReader>(adopt_mapping(std::move(event.fd), bytes));
    remote.probe();
    backlog_.add_ring(remote);
  } else if (type == NoteType::kSegment) {
    auto& segment = remote.in().segments[number];
    if (segment.bytes != 0) fail(ErrorKind::kInvalidArgument, "a second segment ", number);
    if (remote.in().segments.size() > 4096) fail(ErrorKind::kInvalidArgument, "too many segments");
    segment.fd = std::move(event.fd);
    segment.bytes = bytes;
    retry_stalled(remote);
  } else if (type == NoteType::kDrop) {
    remote.in().segments.erase(number);
  } else {
    fail(ErrorKind::kInvalidArgument, "a note of unknown type ", event.frame.segment);
  }
}

}  // namespace convoy::shm
