// The references of a worker: those on their way.
#include <algorithm>

#include "base/concat.h"
#include "base/error.h"
#include "rref/machine.h"
#include "rref/party.h"

namespace convoy::rref {
namespace {

constexpr std::uint64_t kMostPassage = Passed::kReply - 1;

}  // namespace

// --- the sender ---

Passed Machine::pass(Entry& entry, WorkerId to, std::optional<std::uint64_t> answer_to) {
  if (entry.state == EntryState::kDead) fail(entry.failure->kind, entry.failure->text);
  if (closed_) fail(closed_why_.kind, closed_why_.text);
  Party& receiver = current(to);
  ++activity_;
  Passed passed{
      .id = entry.id,
      .owner_incarnation = entry.is_owner ? options_.incarnation : entry.owner->incarnation,
      .passage = receiver.next_passage};
  if (answer_to) passed.passage |= Passed::kReply;
  if (receiver.lost) return passed;  // its message will not go
  ++receiver.next_passage;
  Party::Sent sent{.id = entry.id};
  if (entry.is_owner && to != options_.self) {
    // Known from now on, so that the receiver need not ask.
    sent.fork = passed.fork = kEarlyFork | receiver.next_early++;
    entry.forks.push_back({&receiver, sent.fork});
    entry.registered = true;
  } else {
    sent.entry = &entry;
    ++entry.pins;
  }
  const std::uint64_t number = passed.passage & kMostPassage;
  if (answer_to) {
    sent.call = *answer_to;
    receiver.to_ask.emplace_back(now_ + options_.ask_after, number);
    look_at(receiver);
  }
  receiver.passages.emplace(number, sent);
  return passed;
}

void Machine::passed(WorkerId to, const Passed& reference, Passage how) {
  if (closed_) return;
  Party& receiver = current(to);
  const std::uint64_t number = reference.passage & kMostPassage;
  ++activity_;
  if (!receiver.passages.contains(number)) return;
  switch (how) {
    case Passage::kDelivered: return end_passage(receiver, number, /*taken=*/true);
    case Passage::kNotSent:
      end_passage(receiver, number, /*taken=*/false);
      [[fallthrough]];  // so that it does not wait for this number
    case Passage::kUnknown:
      put(receiver, {.type = RecordType::kClose, .number = number}, Link::When::kLazy);
      return;
  }
}

void Machine::end_passage(Party& to, std::uint64_t number, bool taken) {
  const auto found = to.passages.find(number);
  if (found == to.passages.end()) return;
  const Party::Sent sent = found->second;
  to.passages.erase(found);
  if (sent.entry) {
    --sent.entry->pins;
    release(*sent.entry);
  } else if (!taken) {
    const auto entry = owned_.find(sent.id);
    if (entry != owned_.end()) remove_fork(*entry->second, to, sent.fork);
  }
}

void Machine::hear_settled(Party& from, const Record& record) {
  end_passage(from, record.number, record.type == RecordType::kAccept);
}

// Answers are not answered: what became of the references in them must be asked for, if nobody
// says it.
void Machine::ask_again() {
  for (const auto& [worker, receiver] : current_) {
    while (!receiver->to_ask.empty() && receiver->to_ask.front().first <= now_) {
      const std::uint64_t number = receiver->to_ask.front().second;
      receiver->to_ask.pop_front();
      const auto sent = receiver->passages.find(number);
      if (sent == receiver->passages.end()) continue;
      put(*receiver, {.type = RecordType::kClose, .number = number, .call = sent->second.call},
          Link::When::kNow);
      receiver->to_ask.emplace_back(now_ + options_.ask_after, number);
    }
  }
}

// --- the receiver ---

Entry* Machine::take(WorkerId from, const Passed& passed) {
  Party& sender = current(from);
  const std::uint64_t number = passed.passage & kMostPassage;
  if (number == 0 || number > kMostPassage / 2 || passed.id.number == 0 ||
      passed.owner_incarnation == 0) {
    fail(ErrorKind::kInvalidArgument, "references: invalid id ", to_string(passed.id));
  }
  const bool answer = (passed.passage & Passed::kReply) != 0;
  if (closed_) fail(closed_why_.kind, closed_why_.text);
  ++activity_;
  if (sender.lost || !sender.taken.add(number, 0)) {
    fail(ErrorKind::kCancelled, describe(passed.id), " comes too late: ", name_of(from),
         " has given up");
  }
  if (sender.taken.ranges() > kMostKept) {
    fail(ErrorKind::kInvalidArgument, "references: numbers are out of order");
  }
  Party& owner = party(passed.id.owner, passed.owner_incarnation, &sender);
  require_known(passed.id, owner);
  Entry* entry = nullptr;
  bool is_settled = true;
  if (from == options_.self) {
    const auto sent = sender.passages.find(number);
    if (sent == sender.passages.end() || !sent->second.entry) {
      fail(ErrorKind::kCancelled, describe(passed.id), " comes too late");
    }
    entry = sent->second.entry;
    entry->handles.fetch_add(1);
  } else if (passed.id.owner == options_.self && !owner.lost) {
    entry = take_owned(from, passed);
    is_settled = entry->state != EntryState::kExpected;
  } else if (owner.lost) {
    entry = dead_user(passed, owner,
                      {ErrorKind::kPeerLost,
                       concat(describe(passed.id), ": its owner is lost: ", owner.why),
                       name_of(passed.id.owner),
                       {}});
  } else if (&owner == &sender) {
    entry = take_from_owner(passed, owner);
  } else {
    entry = take_from_user(passed, owner);
    is_settled = entry->state != EntryState::kRequested;
  }
  if (!is_settled) {
    sender.unsettled.emplace(number, answer);
    entry->waiting().passages.emplace_back(&sender, number);
  } else if (answer) {
    put(sender, {.type = RecordType::kAccept, .number = number}, Link::When::kLazy);
  }
  return entry;
}

// Those that this worker creates have the numbers that it has given.
void Machine::require_known(const RRefId& id, const Party& owner) const {
  if (id.creator != options_.self || id.incarnation != options_.incarnation) return;
  const std::uint64_t next = id.owner == options_.self ? next_own_ : owner.next_creation;
  if (id.number < next) return;
  fail(ErrorKind::kInvalidArgument, "references: this worker has not made ", to_string(id));
}

// A reference that came home.
Entry* Machine::take_owned(WorkerId from, const Passed& passed) {
  Failure why;
  Entry* entry = find_owned(passed.id, from, why);
  if (!entry) {
    entry = new Entry(passed.id, /*owned=*/true, EntryState::kDead, nullptr, 0);
    entry->failure = std::make_unique<Failure>(why);
  }
  entry->handles.fetch_add(1);
  return entry;
}

Entry* Machine::dead_user(const Passed& passed, Party& owner, const Failure& failure) {
  auto* const entry = new Entry(passed.id, /*owned=*/false, EntryState::kDead, &owner, 0);
  entry->handles = 1;
  entry->failure = std::make_unique<Failure>(failure);
  return entry;
}

// The owner knows of it. One that is here already stays; the owner hears that this one is not
// needed, after what it was told of the other.
Entry* Machine::take_from_owner(const Passed& passed, Party& owner) {
  if ((passed.fork & kEarlyFork) == 0) {
    fail(ErrorKind::kInvalidArgument, "references: the owner sends one that it does not know");
  }
  const auto found = owner.users.find(passed.id);
  if (found == owner.users.end()) {
    return new_user(passed.id, owner, EntryState::kConfirmed, passed.fork);
  }
  put(owner, {.type = RecordType::kDelete, .id = passed.id, .number = passed.fork},
      Link::When::kLazy);
  found->second->handles.fetch_add(1);
  return found->second;
}

Entry* Machine::take_from_user(const Passed& passed, Party& owner) {
  const auto found = owner.users.find(passed.id);
  if (found != owner.users.end()) {
    found->second->handles.fetch_add(1);
    return found->second;
  }
  if (passed.fork != 0) {
    fail(ErrorKind::kInvalidArgument, "references: one with a number that its owner did not give");
  }
  if (!owner.met && owner.link.unacknowledged() >= kMostKept) {
    fail(ErrorKind::kInvalidArgument, "references: ", to_string(passed.id),
         " and many others are of a worker that is not known here");
  }
  Entry* const entry = new_user(passed.id, owner, EntryState::kRequested, owner.next_fork++);
  owner.requests.emplace(entry->fork, entry);
  if (!owner.met) output_.watch.emplace_back(owner.worker, owner.incarnation);
  current_.try_emplace(owner.worker, &owner);
  put(owner, {.type = RecordType::kRequest, .id = passed.id, .number = entry->fork},
      Link::When::kNow);
  return entry;
}

void Machine::hear_close(Party& from, const Record& record) {
  const std::uint64_t number = record.number;
  if (number == 0 || number > kMostPassage / 2) return;
  const auto refuse = [&] {
    from.taken.add(number, 0);
    if (from.taken.ranges() > kMostKept) {
      fail(ErrorKind::kInvalidArgument, "references: numbers are out of order");
    }
    put(from, {.type = RecordType::kRefuse, .number = number}, Link::When::kLazy);
  };
  if (!from.taken.contains(number)) {
    if (record.call == 0) return refuse();
    // It goes with an answer, which may be here at this moment: it is waited for twice.
    const bool waits = options_.under_way && options_.under_way(from.worker, record.call);
    if (waits) return;
    if (from.doubted.insert(number).second) {
      if (from.doubted.size() <= kMostKept) return;
      fail(ErrorKind::kInvalidArgument, "references: too many answers were asked about");
    }
    from.doubted.erase(number);
    return refuse();
  }
  from.doubted.erase(number);
  const auto unsettled = from.unsettled.find(number);
  if (unsettled != from.unsettled.end()) {
    unsettled->second = true;
  } else {
    put(from, {.type = RecordType::kAccept, .number = number}, Link::When::kLazy);
  }
}

}  // namespace convoy::rref
