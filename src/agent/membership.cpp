#include "agent/membership.h"

#include <algorithm>
#include <chrono>

#include "agent/letters.h"
#include "base/concat.h"
#include "base/error.h"
#include "base/id.h"
#include "base/log.h"
#include "base/wire.h"

namespace convoy::agent {
namespace {

constexpr transport::LetterKind kViewLetter = kFirstOtherLetter + 16;

// How long somebody is waited for whose name another one wants.
constexpr auto kPatience = std::chrono::seconds(2);
constexpr auto kLookAgain = std::chrono::milliseconds(10);

std::string event_key(std::uint64_t version) { return concat("event/", version); }

}  // namespace

// Calls what a user wants to be called, unless the session is over here. What it throws ends
// nothing.
template <class Listener, class... Arguments>
void Membership::call_listener(const Listener& listener, const Arguments&... arguments) noexcept {
  {
    auto state = state_.lock();
    if (state->silent) return;
    ++state->calls;
  }
  try {
    listener(arguments...);
  } catch (const std::exception& error) {
    log_error("rpc: a callback for changes of workers threw: ", error.what());
  } catch (...) {
    log_error(
        "rpc: a callback for changes of workers threw something that is not a std::exception");
  }
  --state_.lock()->calls;
  state_.notify();
}

std::shared_ptr<Membership> Membership::make(Agent& agent) {
  std::shared_ptr<Membership> made(new Membership(agent));
  Membership* const self = made.get();  // the agent ends first
  agent.on_letter(kViewLetter, [self](const Worker&, std::span<const std::byte> body,
                                      std::vector<Part>&&) { self->hear(body); });
  agent.on_stranger([self] { self->agent_.post([self] { self->refresh(); }); });
  agent.accompany(made);
  return made;
}

// --- the log ---

std::string Membership::encode(const Event& event) {
  std::string text;
  WireWriter writer(text);
  writer.put(static_cast<std::uint8_t>(event.kind));
  writer.put<std::uint32_t>(event.worker);
  writer.put_sized<std::uint16_t>(event.member.name);
  writer.put_sized<std::uint32_t>(event.kind == Kind::kJoined ? event.member.address.encode() : "");
  return text;
}

Membership::Event Membership::decode(std::string_view text) {
  WireReader reader(text, "change of a session's workers");
  Event event;
  const auto kind = reader.take<std::uint8_t>();
  if (kind < 1 || kind > 3) fail(ErrorKind::kInvalidArgument, "a change of unknown kind ", kind);
  event.kind = static_cast<Kind>(kind);
  event.worker = reader.take<std::uint32_t>();
  event.member.name = reader.take_sized<std::uint16_t>();
  const std::string address(reader.take_sized<std::uint32_t>());
  if (event.kind == Kind::kJoined) event.member.address = transport::Address::decode(address);
  reader.end();
  return event;
}

Membership::Following::~Following() {
  for (const auto& [worker, error] : dismissed) agent_.dismiss(worker, error);
  if (aborts) agent_.abort();
}

void Membership::read_log(Following& following) {
  for (;;) {
    const std::uint64_t next = state_.lock()->version + 1;
    const auto text = place_.store->try_get(event_key(next));
    if (!text) return;
    apply(decode(*text), agent_.has_met(), following);
  }
}

// The view shows a worker that can be called.
void Membership::apply(const Event& event, bool admits, Following& following) {
  if (event.kind == Kind::kJoined && admits) agent_.admit_more(event.member);
  std::optional<Worker> dismissed;
  {
    auto state = state_.lock();
    ++state->version;
    View view;
    if (event.kind == Kind::kJoined) {
      const Worker worker{event.member.name, static_cast<WorkerId>(state->known.size())};
      state->known.push_back({worker, event.member.address});
      view.joined.push_back(worker);
    } else if (event.worker < state->known.size() && !state->known[event.worker].gone) {
      Known& known = state->known[event.worker];
      known.gone = event.kind;
      (event.kind == Kind::kLeft ? view.left : view.failed).push_back(known.worker);
      dismissed = known.worker;
    }
    publish(*state, std::move(view));
  }
  if (!agent_.has_met()) return;
  agent_.wake();  // who waits for a worker
  if (!dismissed) return;
  if (dismissed->id == agent_.self().id) {
    // The others do not hear this worker any more.
    if (!agent_.is_shut_down() && event.kind == Kind::kFailed) {
      log_error("rpc, ", dismissed->name, ": another worker has lost this one; the session ends");
      following.aborts = true;
    }
    return;
  }
  following.dismissed.emplace_back(
      dismissed->id,
      event.kind == Kind::kLeft
          ? std::nullopt
          : std::optional(Error(ErrorKind::kPeerLost, "another worker has lost it")));
}

// False: another event was there first.
bool Membership::append(const Event& event, Following& following) {
  const std::string text = encode(event);
  const std::uint64_t next = state_.lock()->version + 1;
  if (place_.store->compare_set(event_key(next), "", text) != text) return false;
  apply(event, agent_.has_met(), following);
  return true;
}

void Membership::tell_others(const Event& event, std::uint64_t version) {
  const View now = view();
  std::string body;
  WireWriter writer(body);
  writer.put<std::uint64_t>(version);
  body += encode(event);
  const WorkerId self = agent_.self().id;
  for (const Worker& worker : now.workers) {
    if (worker.id == self) continue;
    try {
      agent_.send_letter(worker.id, kViewLetter, {.body = std::as_bytes(std::span(body))});
    } catch (const Error& error) {
      log_warn("rpc, ", agent_.self().name, ": ", worker.name,
               " cannot be sent the list of workers: ", error.what());
    }
  }
}

void Membership::hear(std::span<const std::byte> body) {
  WireReader reader(std::string_view(reinterpret_cast<const char*>(body.data()), body.size()),
                    "change of a session's workers");
  const auto version = reader.take<std::uint64_t>();
  const Event event = decode(reader.take(reader.left()));
  if (!is_dynamic()) fail(ErrorKind::kInvalidArgument, "the workers of this session do not change");
  agent_.post([this, version, event] {
    try {
      Following following(agent_);
      const std::scoped_lock lock(order_);
      if (version == state_.lock()->version + 1) return apply(event, true, following);
    } catch (const std::exception& error) {
      log_warn("rpc: a change of the session's workers is refused: ", error.what());
    }
    refresh();
  });
}

void Membership::refresh() noexcept try {
  if (!is_dynamic()) return;
  Following following(agent_);
  const std::scoped_lock lock(order_);
  if (store_lost_.empty()) read_log(following);
} catch (const Error& error) {
  const std::scoped_lock lock(order_);
  if (error.kind() == ErrorKind::kPeerLost) store_lost_ = error.what();
  log_warn("rpc: the list of workers cannot be read from the store: ", error.what());
} catch (const std::exception& error) {
  log_warn("rpc: the list of workers cannot be read from the store: ", error.what());
}

// --- coming and going ---

void Membership::begin() {
  if (is_dynamic()) return;
  auto state = state_.lock();
  for (const Worker& worker : agent_.workers()) state->known.push_back({worker, {}});
  state->version = 1;
}

// Whoever had it and is dead is so for all from now on.
void Membership::require_free_name(const std::string& name, Following& following) {
  std::vector<Known> same;
  {
    auto state = state_.lock();
    for (const Known& known : state->known) {
      if (known.worker.name == name && !known.gone) same.push_back(known);
    }
  }
  for (const Known& known : same) {
    // One that was killed a moment ago may not be dead yet.
    const auto patience = Deadline::after(kPatience);
    while (agent_.answers(known.address)) {
      if (!patience.expired()) {
        agent_.wait_aside(Deadline::after(kLookAgain), [] { return false; });
        continue;
      }
      fail(ErrorKind::kInvalidArgument, "the name ", in_quotes(name), " is not unique: worker ",
           known.worker.id, " has it, and is there");
    }
    append({.kind = Kind::kFailed, .worker = known.worker.id}, following);
  }
}

void Membership::join(const Place& place, const Deadline& deadline) {
  place_ = place;
  const Id session = Id::parse(place_.store->compare_set("session", "", Id::random().to_string()));
  const Event event{.member = {agent_.name(), agent_.address()}};
  Following following(agent_);
  std::uint64_t version = 0;
  for (;;) {
    const std::scoped_lock lock(order_);
    if (deadline.expired()) {
      fail(ErrorKind::kTimeout, agent_.name(), " could not join within its time");
    }
    read_log(following);
    require_free_name(event.member.name, following);
    if (!append(event, following)) continue;
    std::vector<Member> members;
    std::vector<WorkerId> gone;
    {
      auto state = state_.lock();
      version = state->version;
      for (const Known& known : state->known) {
        if (known.gone) gone.push_back(known.worker.id);
        members.push_back({known.worker.name, known.address});
      }
    }
    const auto self = static_cast<WorkerId>(members.size() - 1);
    agent_.enter(session, self, members);
    for (const WorkerId id : gone) {
      agent_.dismiss(id, Error(ErrorKind::kPeerLost, "it had gone before this worker came"));
    }
    break;
  }
  tell_others(event, version);
}

void Membership::check_leave() {
  if (!is_dynamic() || !place_.served_here) return;
  const View now = view();
  if (now.workers.size() <= 1) return;
  fail(ErrorKind::kInvalidArgument, agent_.self().name, " serves the session's store, and ",
       now.workers.size() - 1,
       " others are still there: shut it down last; under `convoy run` and with file:// any worker "
       "may leave");
}

void Membership::leave() noexcept {
  if (is_dynamic()) report(agent_.self().id, Kind::kLeft);
}

// Writes it into the log, unless somebody has.
void Membership::report(WorkerId worker, Kind kind) noexcept {
  const Event event{.kind = kind, .worker = worker};
  const auto present = [&] {
    auto state = state_.lock();
    return worker < state->known.size() && !state->known[worker].gone;
  };
  try {
    Following following(agent_);
    const std::scoped_lock lock(order_);
    try {
      for (;;) {
        if (store_lost_.empty()) read_log(following);
        if (!present()) return;
        if (!store_lost_.empty()) {
          apply(event, true, following);  // as far as this worker knows
          break;
        }
        if (append(event, following)) break;
      }
    } catch (const Error& error) {
      log_warn(
          "rpc: the loss of a worker cannot be written to the store, so no worker can join any "
          "more: ",
          error.what());
      store_lost_ = error.what();
      if (present()) apply(event, true, following);
    }
    const std::uint64_t version = state_.lock()->version;
    tell_others(event, version);
  } catch (const std::exception& error) {
    log_warn("rpc: other workers cannot be told of a lost worker: ", error.what());
  }
}

void Membership::gone(const Worker& worker, const std::string& why) noexcept try {
  const Kind kind = agent_.has_left(worker.id) ? Kind::kLeft : Kind::kFailed;
  const Error error(ErrorKind::kPeerLost, why);
  std::vector<OnLost> listeners;
  {
    auto state = state_.lock();
    if (worker.id >= state->known.size()) return;
    Known& known = state->known[worker.id];
    if (known.why) return;
    known.why = error;
    std::erase_if(state->lost_listeners, [&](auto& entry) {
      if (entry.first != worker.id) return false;
      listeners.push_back(std::move(entry.second));
      return true;
    });
    if (!is_dynamic() && !known.gone) {
      known.gone = kind;
      ++state->version;
      View view;
      (kind == Kind::kLeft ? view.left : view.failed).push_back(worker);
      publish(*state, std::move(view));
    }
  }
  for (OnLost& listener : listeners) {
    agent_.post([this, listener = std::move(listener), worker, error] {
      call_listener(listener, worker, error);
    });
  }
  if (is_dynamic()) agent_.post([this, id = worker.id, kind] { report(id, kind); });
} catch (const std::exception& error) {
  log_warn("rpc: ", worker.name, " is gone, and not every worker could be told: ", error.what());
}

// --- who wants to know ---

View Membership::view_of(const State& state) {
  View view{.version = state.version};
  for (const Known& known : state.known) {
    if (!known.gone) view.workers.push_back(known.worker);
  }
  return view;
}

View Membership::view() { return view_of(*state_.lock()); }

// `view` has what changed. The state is locked.
void Membership::publish(State& state, View view) {
  if (state.listeners.empty()) return;
  View now = view_of(state);
  now.joined = std::move(view.joined);
  now.left = std::move(view.left);
  now.failed = std::move(view.failed);
  state.untold.push_back(std::move(now));
  if (std::exchange(state.telling, true)) return;
  agent_.post([this] { tell_listeners(); });
}

void Membership::tell_listeners() {
  for (;;) {
    std::vector<OnChange> listeners;
    View view;
    {
      auto state = state_.lock();
      if (state->untold.empty()) {
        state->telling = false;
        return;
      }
      view = std::move(state->untold.front());
      state->untold.pop_front();
      listeners = state->listeners;
    }
    for (const OnChange& listener : listeners) call_listener(listener, view);
  }
}

Worker Membership::wait_for(const std::string& name, const Deadline& deadline) {
  std::optional<Worker> found;
  const auto look = [&] {
    auto state = state_.lock();
    for (const Known& known : state->known) {
      if (!known.gone && known.worker.name == name) found = known.worker;
    }
    return found || agent_.is_shut_down();
  };
  refresh();
  const bool in_time = agent_.wait_aside(deadline, look);
  if (found) return *found;
  fail(in_time ? ErrorKind::kCancelled : ErrorKind::kTimeout, agent_.name(),
       ": there is no worker ", in_quotes(name), in_time ? ", and this one was shut down" : " yet");
}

View Membership::on_change(OnChange listener) {
  auto state = state_.lock();
  state->listeners.push_back(std::move(listener));
  return view_of(*state);
}

void Membership::on_lost(WorkerId worker, OnLost listener) {
  Worker who;
  Error error(ErrorKind::kPeerLost, "");
  {
    auto state = state_.lock();
    if (worker >= state->known.size()) {
      fail(ErrorKind::kInvalidArgument, "could not find destination: there is no worker ", worker);
    }
    const Known& known = state->known[worker];
    if (!known.why && !known.gone) {
      state->lost_listeners.emplace_back(worker, std::move(listener));
      return;
    }
    who = known.worker;
    error = known.why.value_or(
        Error(ErrorKind::kPeerLost,
              concat(who.name, known.gone == Kind::kLeft ? " has left the session" : " is lost")));
  }
  agent_.post(
      [this, listener = std::move(listener), who, error] { call_listener(listener, who, error); });
}

void Membership::closed() noexcept {
  std::vector<OnChange> listeners;  // what they hold goes without the lock
  std::vector<std::pair<WorkerId, OnLost>> lost_listeners;
  auto state = state_.lock();
  state->silent = true;
  state->untold.clear();
  listeners.swap(state->listeners);
  lost_listeners.swap(state->lost_listeners);
  state.unlock();
}

void Membership::wait_for_callbacks(const Deadline& deadline) {
  if (agent_.in_own_thread()) return;
  auto state = state_.lock();
  if (state.wait(deadline, [&] { return state->calls == 0; })) return;
  log_warn("rpc, ", agent_.name(),
           ": the session has ended, but a callback for changes of workers still runs");
}

}  // namespace convoy::agent
