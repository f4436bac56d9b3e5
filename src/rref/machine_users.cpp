// The references of a worker: to values of others.
#include <algorithm>

#include "base/concat.h"
#include "base/error.h"
#include "rref/machine.h"
#include "rref/party.h"

namespace convoy::rref {

Entry* Machine::new_user(const RRefId& id, Party& owner, EntryState state, std::uint64_t fork) {
  auto* const entry = new Entry(id, /*owned=*/false, state, &owner, fork);
  entry->handles = 1;
  entry->registered = true;
  owner.users[id] = entry;
  return entry;
}

// --- creation ---

Entry* Machine::create(WorkerId owner) {
  if (closed_) fail(closed_why_.kind, closed_why_.text);
  Party& at = current(owner);
  ++activity_;
  if (owner == options_.self) {
    const RRefId id{options_.self, options_.self, options_.incarnation, next_own_++};
    Entry* const entry = new_owned(id, EntryState::kExpected);
    entry->handles = 1;
    entry->pins = 1;
    entry->registered = true;
    return entry;
  }
  const RRefId id{owner, options_.self, options_.incarnation, at.next_creation++};
  Entry* const entry = new_user(id, at, EntryState::kCreating, at.next_fork++);
  entry->pins = 1;
  return entry;
}

void Machine::creation_ended(Entry& entry, const Failure* failure) {
  ++activity_;
  if (entry.is_owner) {
    if (failure) set_failure(entry, *failure);
  } else if (!failure) {
    if (entry.state == EntryState::kCreating) {
      entry.state = EntryState::kConfirmed;
      tell_confirmed(entry);
    }
  } else {
    // If the call has not come there, it must not come later. Others may wait for it.
    put(*entry.owner,
        {.type = RecordType::kAbandon, .id = entry.id, .number = entry.fork, .failure = *failure},
        Link::When::kNow);
    if (entry.state != EntryState::kDead) {
      entry.pins += 1;  // it stays for the rest of this
      die(entry, *failure, /*is_lost=*/false);
      entry.pins -= 1;
    }
  }
  entry.pins -= 1;
  release(entry);
}

// --- its life ---

void Machine::drop(Entry& entry) {
  if (entry.handles.fetch_sub(1) == 1) release(entry);
}

// Ends what nobody needs any more.
void Machine::release(Entry& entry) {
  if (entry.is_owner) {
    if (entry.state != EntryState::kDead) return free_if_unused(entry);
    if (entry.handles.load() == 0 && entry.pins == 0) delete &entry;
    return;
  }
  if (entry.pins != 0) return;
  // A reference of no use needs no longer be known, whoever has it.
  if (entry.state == EntryState::kDead) deregister(entry);
  if (entry.handles.load() != 0) return;
  if (entry.state != EntryState::kDead) {
    entry.owner->users.erase(entry.id);
    deregister(entry);
    settle_passages(entry);
  }
  delete &entry;
}

void Machine::deregister(Entry& entry) {
  if (!std::exchange(entry.registered, false)) return;
  entry.owner->requests.erase(entry.fork);
  put(*entry.owner, {.type = RecordType::kDelete, .id = entry.id, .number = entry.fork},
      Link::When::kLazy);
}

// It is of no use from now on.
void Machine::die(Entry& entry, const Failure& failure, bool is_lost) {
  auto& users = entry.owner->users;
  const auto found = users.find(entry.id);
  if (found != users.end() && found->second == &entry) users.erase(found);
  entry.state = EntryState::kDead;
  entry.failure = std::make_unique<Failure>(failure);
  tell_confirmed(entry);
  if (is_lost && entry.waiters) {
    for (Callback& callback : std::exchange(entry.waiters->lost, {})) {
      call(std::move(callback), &failure);
    }
  }
  release(entry);
}

void Machine::tell_confirmed(Entry& entry) {
  const bool dead = entry.state == EntryState::kDead;
  if (entry.waiters) {
    for (Callback& callback : std::exchange(entry.waiters->confirmed, {})) {
      call(std::move(callback), dead ? entry.failure.get() : nullptr);
    }
  }
  settle_passages(entry);
}

// Its owner knows of it, or it is of no use: whoever sent it may let go of its own.
void Machine::settle_passages(Entry& entry) {
  if (!entry.waiters) return;
  for (const auto& [sender, number] : std::exchange(entry.waiters->passages, {})) {
    const auto found = sender->unsettled.find(number);
    if (found == sender->unsettled.end()) continue;
    const bool asked = found->second;
    sender->unsettled.erase(found);
    if (asked) put(*sender, {.type = RecordType::kAccept, .number = number}, Link::When::kLazy);
  }
}

void Machine::when_confirmed(Entry& entry, Callback&& callback) {
  switch (entry.state) {
    case EntryState::kExpected:
    case EntryState::kCreating:
    case EntryState::kRequested: entry.waiting().confirmed.push_back(std::move(callback)); return;
    case EntryState::kDead: return call(std::move(callback), entry.failure.get());
    default: return call(std::move(callback), nullptr);
  }
}

void Machine::when_settled(Entry& entry, Callback&& callback) {
  const bool ours = entry.state == EntryState::kCreating ||
                    (entry.state == EntryState::kExpected && entry.id.creator == options_.self);
  if (ours) return call(std::move(callback), nullptr);
  when_confirmed(entry, std::move(callback));
}

void Machine::when_lost(Entry& entry, Callback&& callback) {
  if (entry.is_owner) return;
  if (entry.state == EntryState::kDead) {
    if (closed_ || entry.owner->lost) call(std::move(callback), entry.failure.get());
    return;
  }
  entry.waiting().lost.push_back(std::move(callback));
}

std::optional<Failure> Machine::failure(const Entry& entry) const {
  if (entry.state != EntryState::kDead) return std::nullopt;
  return *entry.failure;
}

// --- what owners say ---

void Machine::hear_confirm(Party& from, const Record& record) {
  const auto found = from.requests.find(record.number);
  if (found == from.requests.end()) return;
  Entry& entry = *found->second;
  from.requests.erase(found);
  entry.state = EntryState::kConfirmed;
  tell_confirmed(entry);
}

void Machine::hear_dead(Party& from, const Record& record) {
  const auto found = from.requests.find(record.number);
  if (found == from.requests.end()) return;
  Entry& entry = *found->second;
  from.requests.erase(found);
  entry.registered = false;
  die(entry, record.failure, /*is_lost=*/false);
}

}  // namespace convoy::rref
