// The references of a worker: values that are here.
#include <algorithm>

#include "base/concat.h"
#include "base/error.h"
#include "rref/machine.h"
#include "rref/party.h"

namespace convoy::rref {
namespace {

constexpr std::uint64_t kMostNumber = UINT64_MAX / 2;

}  // namespace

Entry* Machine::new_owned(const RRefId& id, EntryState state) {
  auto* const entry = new Entry(id, /*owned=*/true, state, nullptr, 0);
  owned_[id] = entry;
  return entry;
}

// A value here, or one that is still to come. nullptr: there is none, and will be none.
// `by` asks for it.
Entry* Machine::find_owned(const RRefId& id, WorkerId by, Failure& why) {
  const auto found = owned_.find(id);
  if (found != owned_.end()) return found->second;
  why = {ErrorKind::kInvalidArgument,
         concat(describe(id), " was deleted: nobody referred to it any more"),
         name_of(id.owner),
         {}};
  if (closed_) {
    why = closed_why_;
    return nullptr;
  }
  if (id.creator == options_.self && id.incarnation == options_.incarnation) return nullptr;
  Party& creator = party(id.creator, id.incarnation, &current(by));
  if (creator.lost) {
    why = {ErrorKind::kPeerLost,
           concat(describe(id), ": its creator is lost: ", creator.why),
           name_of(id.creator),
           {}};
    return nullptr;
  }
  if (id.number == 0 || id.number > kMostNumber || creator.created.contains(id.number)) {
    return nullptr;
  }
  if (creator.expected >= kMostKept) {
    why = {ErrorKind::kResource,
           concat(describe(id), ": ", kMostKept, " others that ", name_of(id.creator),
                  " is to create are waited for already"),
           name_of(id.owner),
           {}};
    return nullptr;
  }
  // The call that creates it was overtaken. If its caller is gone, somebody must notice.
  output_.watch.emplace_back(id.creator, id.incarnation);
  Entry* const entry = new_owned(id, EntryState::kExpected);
  entry->counted = true;
  ++creator.expected;
  return entry;
}

// It is not waited for any more.
void Machine::uncount(Entry& entry) {
  if (std::exchange(entry.counted, false)) --party(entry.id.creator, entry.id.incarnation).expected;
}

Entry* Machine::make(Value value) {
  const RRefId id{options_.self, options_.self, options_.incarnation, next_own_++};
  Entry* const entry = new_owned(id, EntryState::kReady);
  entry->value = std::move(value);
  entry->handles = 1;
  return entry;
}

Entry* Machine::begin(WorkerId from, const CreationHead& head) {
  const RRefId& id = head.id;
  Party& creator = current(from);
  if (id.owner != options_.self || id.creator != from || id.number == 0 ||
      id.number > kMostNumber) {
    fail(ErrorKind::kInvalidArgument, "references: not a value of this worker: ", to_string(id));
  }
  const auto refuse = [&] {
    fail(ErrorKind::kCancelled, describe(id), " is not created: its creator has given up");
  };
  if (closed_ || creator.lost || creator.incarnation != id.incarnation) refuse();
  const auto found = owned_.find(id);
  if (from == options_.self) {
    if (found == owned_.end() || found->second->state != EntryState::kExpected) refuse();
  } else {
    if (!creator.created.add(id.number, 0)) refuse();
    if (creator.created.ranges() > kMostKept) {
      fail(ErrorKind::kInvalidArgument, "references: numbers of values are out of order");
    }
  }
  Entry* const entry = found == owned_.end() ? new_owned(id, EntryState::kExpected) : found->second;
  entry->handles.fetch_add(1);
  entry->registered = true;
  ++activity_;
  begun(*entry);
  if (from != options_.self) entry->forks.push_back({&creator, head.fork});
  return entry;
}

// Those who were told to wait hear that it will be there.
void Machine::begun(Entry& entry) {
  uncount(entry);
  entry.state = EntryState::kRunning;
  for (const Entry::Fork& fork : entry.forks) {
    if ((fork.number & kEarlyFork) != 0) continue;
    put(*fork.user, {.type = RecordType::kConfirm, .number = fork.number}, Link::When::kNow);
  }
  tell_confirmed(entry);
}

void Machine::set_value(Entry& entry, Value&& value) {
  if (entry.state != EntryState::kRunning && entry.state != EntryState::kExpected) {
    output_.values.push_back(std::move(value));
    return;
  }
  entry.value = std::move(value);
  entry.state = EntryState::kReady;
  tell_value(entry);
}

void Machine::set_failure(Entry& entry, const Failure& failure) {
  if (entry.state != EntryState::kRunning && entry.state != EntryState::kExpected) return;
  // Of a creation on this worker that never began: those who wait hear of it from the failure.
  if (entry.state == EntryState::kExpected) begun(entry);
  entry.failure = std::make_unique<Failure>(failure);
  entry.state = EntryState::kFailed;
  tell_value(entry);
}

void Machine::tell_value(Entry& entry) {
  if (!entry.waiters) return;
  for (ValueCallback& callback : std::exchange(entry.waiters->value, {})) {
    call(std::move(callback), &entry.value, entry.failure.get());
  }
}

void Machine::when_value(Entry& entry, ValueCallback&& callback) {
  switch (entry.state) {
    case EntryState::kReady: return call(std::move(callback), &entry.value, nullptr);
    case EntryState::kFailed:
    case EntryState::kDead: return call(std::move(callback), nullptr, entry.failure.get());
    default: break;
  }
  CONVOY_CHECK(entry.is_owner);
  entry.waiting().value.push_back(std::move(callback));
}

Value Machine::ready_value(const RRefId& id) const {
  const auto found = owned_.find(id);
  if (found == owned_.end() || found->second->state != EntryState::kReady) return {};
  return found->second->value;
}

void Machine::when_value(WorkerId from, const RRefId& id, ValueCallback&& callback) {
  Failure why;
  if (id.owner != options_.self) {
    fail(ErrorKind::kInvalidArgument, describe(id), " is not here");
  }
  Entry* const entry = find_owned(id, from, why);
  if (!entry) return call(std::move(callback), nullptr, &why);
  when_value(*entry, std::move(callback));
}

// --- what others say ---

void Machine::hear_request(Party& from, const Record& record) {
  if ((record.number & kEarlyFork) != 0) {
    fail(ErrorKind::kInvalidArgument, "references: a request with a number that owners give");
  }
  Failure why;
  Entry* const entry =
      record.id.owner == options_.self ? find_owned(record.id, from.worker, why) : nullptr;
  if (!entry) {
    put(from, {.type = RecordType::kDead, .number = record.number, .failure = why},
        Link::When::kNow);
    return;
  }
  if (entry->forks.size() >= kMostForks &&
      std::count_if(entry->forks.begin(), entry->forks.end(), [&](const Entry::Fork& each) {
        return each.user == &from && (each.number & kEarlyFork) == 0;
      }) >= static_cast<std::ptrdiff_t>(kMostForks)) {
    fail(ErrorKind::kInvalidArgument, "references: ", name_of(from.worker), " refers to ",
         describe(record.id), " more than ", kMostForks, " times");
  }
  entry->forks.push_back({&from, record.number});
  entry->registered = true;
  if (entry->state == EntryState::kExpected) return;  // begun() or fail_expected() answers
  put(from, {.type = RecordType::kConfirm, .number = record.number}, Link::When::kNow);
}

void Machine::hear_delete(Party& from, const Record& record) {
  const auto found = owned_.find(record.id);
  if (found != owned_.end()) remove_fork(*found->second, from, record.number);
}

void Machine::hear_abandon(Party& from, const Record& record) {
  const RRefId& id = record.id;
  if (id.creator != from.worker || id.incarnation != from.incarnation || id.number == 0 ||
      id.number > kMostNumber) {
    return;
  }
  // From now on its call is too late.
  if (!from.created.add(id.number, 0)) return;
  if (from.created.ranges() > kMostKept) {
    fail(ErrorKind::kInvalidArgument, "references: numbers of values are out of order");
  }
  const auto found = owned_.find(id);
  if (found != owned_.end()) fail_expected(*found->second, record.failure);
}

// It will never be there.
void Machine::fail_expected(Entry& entry, const Failure& failure) {
  uncount(entry);
  for (const Entry::Fork& fork : std::exchange(entry.forks, {})) {
    put(*fork.user, {.type = RecordType::kDead, .number = fork.number, .failure = failure},
        Link::When::kNow);
  }
  entry.failure = std::make_unique<Failure>(failure);
  entry.state = EntryState::kDead;
  owned_.erase(entry.id);
  tell_value(entry);
  tell_confirmed(entry);
  if (entry.handles.load() == 0 && entry.pins == 0) delete &entry;
}

void Machine::remove_fork(Entry& entry, const Party& user, std::uint64_t number) {
  const auto fork = std::find_if(
      entry.forks.begin(), entry.forks.end(),
      [&](const Entry::Fork& each) { return each.user == &user && each.number == number; });
  if (fork == entry.forks.end()) return;
  entry.forks.erase(fork);
  free_if_unused(entry);
}

void Machine::free_if_unused(Entry& entry) {
  if (entry.handles.load() != 0 || entry.pins != 0 || !entry.forks.empty()) return;
  const bool open = entry.state == EntryState::kExpected || entry.state == EntryState::kRunning;
  if (open && entry.waiters &&
      (!entry.waiters->value.empty() || !entry.waiters->confirmed.empty() ||
       !entry.waiters->passages.empty())) {
    // Somebody asked for it: the call that creates it may still come.
    if (entry.state == EntryState::kExpected) return;
    entry.failure = std::make_unique<Failure>(
        Failure{ErrorKind::kInternal,
                concat(describe(entry.id), ": its function ended without a value"),
                name_of(options_.self),
                {}});
    tell_value(entry);
  }
  uncount(entry);
  const auto found = owned_.find(entry.id);
  if (found != owned_.end() && found->second == &entry) owned_.erase(found);
  output_.values.push_back(std::move(entry.value));
  delete &entry;
}

}  // namespace convoy::rref
