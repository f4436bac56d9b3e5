#include "transport/simulation.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <list>
#include <map>
#include <semaphore>
#include <thread>
#include <unordered_map>

#include "base/error.h"
#include "base/random.h"
#include "base/thread.h"

namespace convoy::transport {
namespace simulated {

using Time = Deadline::Clock::time_point;

// More than this in pieces, and a letter may be overtaken: it is a large one elsewhere, too.
constexpr std::size_t kSmallPieces = 2048;
constexpr std::size_t kMostSimulatedBytes = std::size_t{1} << 30;

class SimulatedEndpoint;

// A thread that runs while it has the baton.
struct Runner {
  std::thread thread;
  std::binary_semaphore go{0};
  bool ended = false;
  // While it waits:
  const FunctionRef<bool()>* ready = nullptr;
  bool due = false;  // its turn, or its deadline, is an event already
  std::exception_ptr error;
};

inline thread_local Runner* current_runner = nullptr;

class SimulatedRemote final : public Remote {
 public:
  SimulatedRemote(SimulatedEndpoint& owner, const Address& address, const std::string& name)
      : Remote(address, name), owner_(owner) {}

  SendResult try_send(const Letter& letter, Sent on_sent) override;
  bool lost() const override { return lost_; }
  void cut() noexcept override;

 private:
  friend class SimulatedEndpoint;
  friend struct World::Impl;

  SimulatedEndpoint& owner_;
  bool lost_ = false;     // nothing is sent any more
  bool told_ = false;     // lost() was called
  bool blocked_ = false;  // try_send has refused
  std::size_t on_the_way_ = 0;
  Time last_[2] = {};                   // when the last small letter arrives, by Letter::reply
  Time first_{};                        // when it has been greeted: nothing arrives before
  std::map<std::uint64_t, Sent> sent_;  // of letters on their way
};

}  // namespace simulated

using simulated::Runner;
using simulated::SimulatedEndpoint;
using simulated::SimulatedRemote;
using simulated::Time;

struct World::Impl {
  explicit Impl(const WorldOptions& chosen) : options(chosen), random(chosen.seed) {}

  struct Event {
    Id owner;  // whose timer it is, or zeros
    std::function<void()> run;
  };

  const WorldOptions options;
  Random random;
  // Not 0: code that takes a time of 0 for none must work as elsewhere.
  Time now = Time(std::chrono::hours(1));
  std::uint64_t next_number = 1;
  std::map<std::pair<Time, std::uint64_t>, Event> events;
  std::unordered_map<std::uint64_t, Time> times;  // of events that can be cancelled
  std::map<Id, SimulatedEndpoint*> endpoints;     // that live
  struct Departure {
    std::string why;
    std::map<Id, Time> last;  // when the last of its letters arrive, by receiver
  };
  std::map<Id, Departure> departed;
  std::list<Runner> runners;
  std::binary_semaphore baton{0};  // comes back to the world
  bool ending = false;

  std::uint64_t at(Time when, std::function<void()> run, const Id& owner = {}) {
    const std::uint64_t number = next_number++;
    events.emplace(std::pair(std::max(when, now), number), Event{owner, std::move(run)});
    return number;
  }
  std::chrono::nanoseconds between(std::chrono::nanoseconds least, std::chrono::nanoseconds most) {
    if (most <= least) return least;
    return least + std::chrono::nanoseconds(
                       random.below(static_cast<std::uint64_t>((most - least).count()) + 1));
  }
  std::chrono::nanoseconds delay() { return between(options.least_delay, options.most_delay); }
  SimulatedEndpoint* find(const Id& id) {
    const auto found = endpoints.find(id);
    return found == endpoints.end() ? nullptr : found->second;
  }

  bool step();
  void resume(Runner& runner);
  void let_ready_run();
  bool wait_as(Runner& runner, const Deadline& deadline, const FunctionRef<bool()>& ready);
  void leave(SimulatedEndpoint& endpoint, const std::string& why);
  void lose(const Id& at, const Id& whom, const std::string& why, Time not_before);
  void greet(const Id& from, const Id& to, const std::string& name, const Address& address);
  void deliver(const Id& from, const Id& to, const KeptLetter& letter, std::uint64_t number);
};

namespace simulated {

class SimulatedEndpoint final : public Endpoint {
 public:
  SimulatedEndpoint(World::Impl& world, Inbox& inbox, const std::string& name)
      : world_(world), inbox_(inbox), name_(name) {
    for (auto& byte : address_.id.bytes) byte = static_cast<std::uint8_t>(world.random.next());
    address_.where = "simulated";
    world.endpoints[address_.id] = this;
  }
  ~SimulatedEndpoint() override {
    const Error closed(ErrorKind::kPeerLost, "the endpoint was closed");
    for (const auto& [id, remote] : remotes_) {
      for (auto& [number, on_sent] : std::exchange(remote->sent_, {})) on_sent(&closed);
    }
    world_.leave(*this, "closed its endpoint");
  }

  const Address& address() const override { return address_; }
  Remote& remote(const Address& address) override;
  bool poll(Serve) override { return world_.step(); }
  bool wait(const Deadline& deadline, FunctionRef<bool()> ready) override;
  void wake() noexcept override {}  // the world looks after every event
  Clock::time_point now() const override { return world_.now; }
  TimerId call_at(Clock::time_point when, std::function<void()> function) override;
  bool cancel(TimerId id) override;

 private:
  friend class SimulatedRemote;
  friend struct World::Impl;

  World::Impl& world_;
  Inbox& inbox_;
  const std::string name_;
  Address address_;
  std::map<Id, std::unique_ptr<SimulatedRemote>> remotes_;
};

SendResult SimulatedRemote::try_send(const Letter& letter, Sent on_sent) {
  check_letter(letter, kMostSimulatedBytes);
  auto& world = owner_.world_;
  if (lost_ || !world.find(owner_.address_.id)) return SendResult::kLost;
  if (on_the_way_ >= world.options.credit) {
    blocked_ = true;
    return SendResult::kWouldBlock;
  }
  auto kept = std::make_shared<const KeptLetter>(letter);
  const bool stays = std::any_of(letter.pieces.begin(), letter.pieces.end(),
                                 [](const Piece& piece) { return piece.stays; });
  Time when = std::max(world.now + world.delay(), first_);
  if (piece_bytes(letter) <= kSmallPieces) {
    Time& last = last_[letter.reply ? 1 : 0];
    last = when = std::max(when, last);
  }
  ++on_the_way_;
  const std::uint64_t number = world.next_number;
  world.at(when, [&world, from = owner_.address_.id, to = address().id, kept, number] {
    world.deliver(from, to, *kept, number);
  });
  if (stays && on_sent) {
    sent_.emplace(number, std::move(on_sent));
  } else if (on_sent) {
    on_sent(nullptr);
  }
  return SendResult::kSent;
}

void SimulatedRemote::cut() noexcept {
  if (lost_) return;
  auto& world = owner_.world_;
  lost_ = true;
  world.lose(owner_.address_.id, address().id, "was cut off by this process", world.now);
  world.lose(address().id, owner_.address_.id, "cut the connection", std::max(last_[0], last_[1]));
}

Remote& SimulatedEndpoint::remote(const Address& address) {
  auto& found = remotes_[address.id];
  if (found) return *found;
  SimulatedEndpoint* const other = world_.find(address.id);
  if (!other) {
    remotes_.erase(address.id);
    fail(ErrorKind::kPeerLost, "there is no endpoint ", address.id.to_string(), " (any more)");
  }
  found = std::make_unique<SimulatedRemote>(*this, address, other->name_);
  const Time when = world_.now + world_.delay();
  found->first_ = found->last_[0] = found->last_[1] = when;
  world_.at(when, [&world = world_, from = address_, to = address.id, name = name_] {
    world.greet(from.id, to, name, from);
  });
  return *found;
}

bool SimulatedEndpoint::wait(const Deadline& deadline, FunctionRef<bool()> ready) {
  if (current_runner) return world_.wait_as(*current_runner, deadline, ready);
  while (!ready()) {
    const auto next = world_.events.begin();
    const bool any = next != world_.events.end();
    if (!any || (!deadline.is_never() && next->first.first > deadline.when())) {
      if (deadline.is_never()) return false;
      world_.now = std::max(world_.now, deadline.when());
      return ready();
    }
    world_.step();
  }
  return true;
}

Endpoint::TimerId SimulatedEndpoint::call_at(Clock::time_point when,
                                             std::function<void()> function) {
  const TimerId id = world_.next_number;
  world_.at(
      when,
      [this, id, run = std::move(function)] {
        world_.times.erase(id);
        run();
      },
      address_.id);
  world_.times[id] = std::max(when, world_.now);
  return id;
}

bool SimulatedEndpoint::cancel(TimerId id) {
  const auto found = world_.times.find(id);
  if (found == world_.times.end()) return false;
  world_.events.erase({found->second, id});
  world_.times.erase(found);
  return true;
}

}  // namespace simulated

// --- what happens ---

void World::Impl::greet(const Id& from, const Id& to, const std::string& name,
                        const Address& address) {
  SimulatedEndpoint* const receiver = find(to);
  if (!receiver) return;
  auto& remote = receiver->remotes_[from];
  if (remote) return;
  remote = std::make_unique<SimulatedRemote>(*receiver, address, name);
  receiver->inbox_.joined(*remote);
  // It may have gone while its greeting was on its way.
  if (const auto gone = departed.find(from); gone != departed.end()) {
    lose(to, from, gone->second.why, gone->second.last[to]);
  }
}

void World::Impl::deliver(const Id& from, const Id& to, const KeptLetter& letter,
                          std::uint64_t number) {
  Sent on_sent;
  bool room = false;
  if (SimulatedEndpoint* const sender = find(from)) {
    SimulatedRemote& remote = *sender->remotes_.at(to);
    --remote.on_the_way_;
    room = std::exchange(remote.blocked_, false);
    if (const auto found = remote.sent_.find(number); found != remote.sent_.end()) {
      on_sent = std::move(found->second);
      remote.sent_.erase(found);
    }
  }
  SimulatedEndpoint* const receiver = find(to);
  SimulatedRemote* const remote = receiver ? receiver->remotes_.at(from).get() : nullptr;
  const bool arrives = remote && !remote->told_;
  if (arrives) {
    Arrival arrival{letter.kind(), letter.reply(), letter.head(), {}};
    for (std::size_t i = 0; i < letter.pieces().size(); ++i) {
      const auto bytes = letter.pieces()[i].bytes;
      const auto place = bytes.empty() ? std::span<std::byte>()
                                       : receiver->inbox_.place(*remote, arrival, i, bytes.size());
      if (place.empty()) {
        arrival.parts.push_back(owned_part(bytes));
      } else {
        CONVOY_CHECK(place.size() == bytes.size());
        std::memcpy(place.data(), bytes.data(), bytes.size());
        arrival.parts.push_back({.bytes = place});
      }
    }
    receiver->inbox_.arrived(*remote, std::move(arrival));
  }
  if (on_sent) {
    const Error error(ErrorKind::kPeerLost, "the receiver has gone");
    on_sent(arrives ? nullptr : &error);
  }
  if (SimulatedEndpoint* const sender = room ? find(from) : nullptr) {
    SimulatedRemote& blocked = *sender->remotes_.at(to);
    if (!blocked.lost_) sender->inbox_.room(blocked);
  }
}

// Tells the endpoint `at` that `whom` is lost; what arrives later is dropped.
void World::Impl::lose(const Id& at_whom, const Id& whom, const std::string& why, Time not_before) {
  const Time when = std::max(not_before, now + between({}, options.most_detection));
  at(when, [this, at_whom, whom, why] {
    SimulatedEndpoint* const endpoint = find(at_whom);
    if (!endpoint) return;
    const auto found = endpoint->remotes_.find(whom);
    if (found == endpoint->remotes_.end() || found->second->told_) return;
    SimulatedRemote& remote = *found->second;
    remote.lost_ = remote.told_ = true;
    const Error error(ErrorKind::kPeerLost, concat(remote.name(), " ", why));
    for (auto& [number, on_sent] : std::exchange(remote.sent_, {})) on_sent(&error);
    endpoint->inbox_.lost(remote, error);
  });
}

void World::Impl::leave(SimulatedEndpoint& endpoint, const std::string& why) {
  const Id id = endpoint.address_.id;
  if (endpoints.erase(id) == 0) return;
  std::erase_if(events, [&](const auto& event) {
    if (event.second.owner != id) return false;
    times.erase(event.first.second);
    return true;
  });
  Departure& departure = departed[id];
  departure.why = why;
  if (!options.lose_tails) {
    for (const auto& [other_id, remote] : endpoint.remotes_) {
      departure.last[other_id] = std::max(remote->last_[0], remote->last_[1]);
    }
  }
  for (const auto& [other_id, other] : endpoints) {
    if (other->remotes_.contains(id)) lose(other_id, id, why, departure.last[other_id]);
  }
}

// --- time and threads ---

bool World::Impl::step() {
  if (events.empty()) return false;
  auto next = events.extract(events.begin());
  now = next.key().first;
  next.mapped().run();
  let_ready_run();
  return true;
}

void World::Impl::let_ready_run() {
  for (Runner& runner : runners) {
    if (!runner.ready || runner.due || !(*runner.ready)()) continue;
    runner.due = true;
    at(now + between({}, options.least_delay), [this, &runner] { resume(runner); });
  }
}

void World::Impl::resume(Runner& runner) {
  if (runner.ended) return;
  runner.go.release();
  baton.acquire();
  if (!runner.ended) return;
  runner.thread.join();
  if (runner.error && !ending) std::rethrow_exception(std::exchange(runner.error, nullptr));
}

bool World::Impl::wait_as(Runner& runner, const Deadline& deadline,
                          const FunctionRef<bool()>& ready) {
  while (!ready()) {
    if (!deadline.is_never() && now >= deadline.when()) return false;
    runner.ready = &ready;
    runner.due = false;
    std::uint64_t alarm = 0;
    if (!deadline.is_never()) {
      alarm = at(deadline.when(), [this, &runner] {
        if (runner.due) return;
        runner.due = true;
        resume(runner);
      });
    }
    baton.release();
    runner.go.acquire();
    runner.ready = nullptr;
    if (alarm != 0) events.erase({deadline.when(), alarm});
    if (ending) fail(ErrorKind::kPeerLost, "the simulated world has ended");
  }
  return true;
}

// --- the public side ---

World::World(const WorldOptions& options) : impl_(std::make_unique<Impl>(options)) {}

World::~World() {
  impl_->ending = true;
  for (Runner& runner : impl_->runners) impl_->resume(runner);
}

std::unique_ptr<Endpoint> World::join(Inbox& inbox, const std::string& name) {
  return std::make_unique<SimulatedEndpoint>(*impl_, inbox, name);
}

void World::crash(Endpoint& endpoint) {
  impl_->leave(dynamic_cast<SimulatedEndpoint&>(endpoint), "crashed");
}

void World::start(std::function<void()> function) {
  Runner& runner = impl_->runners.emplace_back();
  runner.thread = start_thread([this, &runner, run = std::move(function)] {
    runner.go.acquire();
    simulated::current_runner = &runner;
    try {
      if (!impl_->ending) run();
    } catch (...) {
      runner.error = std::current_exception();
    }
    runner.ended = true;
    impl_->baton.release();
  });
  impl_->at(impl_->now + impl_->between({}, impl_->options.least_delay),
            [this, &runner] { impl_->resume(runner); });
}

bool World::step() { return impl_->step(); }

bool World::run(FunctionRef<bool()> ready, std::uint64_t most_steps) {
  for (std::uint64_t i = 0; !ready(); ++i) {
    if (i == most_steps || !impl_->step()) return false;
  }
  return true;
}

void World::run_out() {
  while (impl_->step()) {
  }
}

std::size_t World::running() const {
  return static_cast<std::size_t>(std::count_if(impl_->runners.begin(), impl_->runners.end(),
                                                [](const Runner& r) { return !r.ended; }));
}

World::Clock::time_point World::now() const { return impl_->now; }

void World::call_after(std::chrono::nanoseconds delay, std::function<void()> function) {
  impl_->at(impl_->now + delay, std::move(function));
}

std::uint64_t World::random(std::uint64_t below) { return impl_->random.below(below); }

}  // namespace convoy::transport
