// The references of a worker: others, letters, the end. Values are in machine_values.cpp,
// references to others' values in machine_users.cpp, those on their way in machine_passages.cpp.
#include "rref/machine.h"

#include <algorithm>

#include "base/concat.h"
#include "base/error.h"
#include "rref/party.h"

namespace convoy::rref {

Machine::Machine(const MachineOptions& options) : options_(options) {
  CONVOY_CHECK(options.incarnation != 0);
  current_[options.self] = &party(options.self, options.incarnation);
  current_[options.self]->met = true;
  current_[options.self]->name = options.name;
}

Machine::~Machine() {
  for (const auto& [id, entry] : owned_) delete entry;
  for (const auto& [key, known] : parties_) {
    for (const auto& [id, entry] : known->users) delete entry;
  }
}

Output Machine::output() {
  // What this worker has to say to itself.
  while (!local_.empty()) {
    const Record record = std::move(local_.front());
    local_.pop_front();
    apply(current(options_.self), record);
  }
  return std::exchange(output_, {});
}

// --- others ---

Party& Machine::party(WorkerId worker, Incarnation incarnation, Party* by) {
  const std::pair key(worker, incarnation);
  const auto found = parties_.find(key);
  if (found != parties_.end()) return *found->second;
  if (by && by->named >= kMostNamed) {
    fail(ErrorKind::kInvalidArgument, "references: ", name_of(by->worker), " tells of ", kMostNamed,
         " workers that are not known here");
  }
  const auto known = parties_
                         .emplace(key, std::make_unique<Party>(
                                           worker, incarnation,
                                           Link(options_.incarnation, incarnation, options_.times)))
                         .first->second.get();
  known->named_by = by;
  if (by) ++by->named;
  // This worker knows who it is.
  if (worker == options_.self && current_.contains(worker)) {
    known->lost = true;
    known->why = "it is gone";
  }
  return *known;
}

Party& Machine::current(WorkerId worker) {
  const auto found = current_.find(worker);
  if (found == current_.end()) {
    fail(ErrorKind::kInvalidArgument, "references: worker ", worker, " is not known here");
  }
  return *found->second;
}

std::string Machine::name_of(WorkerId worker) const {
  const auto found = current_.find(worker);
  return found == current_.end() || found->second->name.empty() ? concat("worker ", worker)
                                                                : found->second->name;
}

std::string Machine::describe(const RRefId& id) const {
  return concat("RRef (", name_of(id.owner), ", #", id.number, " of ", name_of(id.creator), ")");
}

void Machine::met(WorkerId worker, Incarnation incarnation, const std::string& name) {
  Party& known = party(worker, incarnation);
  known.met = true;
  if (Party* const by = std::exchange(known.named_by, nullptr)) --by->named;
  if (!name.empty()) known.name = name;
  const auto before = current_.find(worker);
  if (before != current_.end() && before->second != &known && !known.lost) {
    lost(worker, before->second->incarnation, "another process has its name");
  }
  if (before == current_.end() || !known.lost) current_[worker] = &known;
}

void Machine::lost(WorkerId worker, Incarnation incarnation, const std::string& why) {
  Party& gone = party(worker, incarnation);
  if (gone.lost) return;
  gone.lost = true;
  gone.why = why;
  current_.try_emplace(worker, &gone);
  const Failure failure{ErrorKind::kPeerLost, why, name_of(worker), {}};
  // Its references to values here end with it.
  std::vector<Entry*> entries;
  for (const auto& [id, entry] : owned_) entries.push_back(entry);
  for (Entry* const entry : entries) {
    const bool expected = entry->state == EntryState::kExpected && entry->id.creator == worker &&
                          entry->id.incarnation == incarnation;
    std::erase_if(entry->forks, [&](const Entry::Fork& fork) { return fork.user == &gone; });
    if (expected) {
      fail_expected(*entry, {ErrorKind::kPeerLost,
                             concat(describe(entry->id), ": its creator is lost: ", why),
                             name_of(worker),
                             {}});
    } else {
      free_if_unused(*entry);
    }
  }
  // Our references to values there are of no use.
  entries.clear();
  for (const auto& [id, entry] : gone.users) entries.push_back(entry);
  for (Entry* const entry : entries) {
    Failure dead = failure;
    dead.text = concat(describe(entry->id), ": its owner is lost: ", why);
    die(*entry, dead, /*is_lost=*/true);
  }
  // What was on its way to it does not arrive any more.
  std::vector<std::uint64_t> numbers;
  for (const auto& [number, sent] : gone.passages) numbers.push_back(number);
  for (const std::uint64_t number : numbers) end_passage(gone, number, /*taken=*/false);
  gone.unsettled.clear();
  gone.requests.clear();
  gone.to_ask.clear();
  gone.doubted.clear();
}

void Machine::reconnected(WorkerId worker, Incarnation incarnation) {
  Party& known = party(worker, incarnation);
  if (known.lost) return;
  known.link.reconnected(now_);
  look_at(known);
}

// --- letters ---

void Machine::put(Party& to, Record record, Link::When when) {
  if (closed_ || to.lost) return;
  ++activity_;
  if (&to == current_.at(options_.self)) {
    local_.push_back(std::move(record));
  } else {
    to.link.put(record, when, now_);
    look_at(to);
  }
}

void Machine::hear(WorkerId from, std::span<const std::byte> bytes) {
  ReferenceLetter letter = decode_letter(bytes);
  // One of another time.
  if (closed_ || from == options_.self || letter.head.to != options_.incarnation ||
      letter.head.from == 0) {
    return;
  }
  const auto now = current_.find(from);
  if (now != current_.end() && now->second->incarnation != letter.head.from) return;
  Party& sender = party(from, letter.head.from);
  if (sender.lost) return;
  current_.try_emplace(from, &sender);
  const std::uint64_t acknowledged = sender.link.acknowledged();
  const auto records = sender.link.hear(std::move(letter), now_);
  if (sender.link.acknowledged() != acknowledged) sender.answers = 0;
  const std::size_t before = sender.link.unacknowledged();
  for (const Record& record : records) {
    ++activity_;
    apply(sender, record);
  }
  look_at(sender);
  // Who asks and asks, but never hears what we say, makes us keep all of it.
  sender.answers += sender.link.unacknowledged() - before;
  if (sender.answers > kMostKept) {
    fail(ErrorKind::kInvalidArgument, "references: ", name_of(from),
         " sends requests but takes no answers");
  }
}

void Machine::apply(Party& from, const Record& record) {
  switch (record.type) {
    case RecordType::kRequest: return hear_request(from, record);
    case RecordType::kConfirm: return hear_confirm(from, record);
    case RecordType::kDead: return hear_dead(from, record);
    case RecordType::kDelete: return hear_delete(from, record);
    case RecordType::kAbandon: return hear_abandon(from, record);
    case RecordType::kAccept:
    case RecordType::kRefuse: return hear_settled(from, record);
    case RecordType::kClose: return hear_close(from, record);
  }
}

void Machine::collect(Send send) {
  if (closed_) return;
  ask_again();
  for (const auto& [worker, known] : current_) {
    if (known->lost) continue;
    known->link.collect(now_,
                        [&, to = worker](std::string&& letter) { send(to, std::move(letter)); });
  }
  next_ = Time::max();
  for (const auto& [worker, known] : current_) look_at(*known);
}

// Of all others nothing is due earlier than before: they need not be looked at.
void Machine::look_at(const Party& known) {
  if (known.lost) return;
  next_ = std::min(next_, known.link.next());
  if (!known.to_ask.empty()) next_ = std::min(next_, known.to_ask.front().first);
}

void Machine::call(Callback&& callback, const Failure* failure) {
  if (failure) {
    output_.calls.emplace_back(
        [callback = std::move(callback), failure = *failure] { callback(&failure); });
  } else {
    output_.calls.emplace_back([callback = std::move(callback)] { callback(nullptr); });
  }
}

void Machine::call(ValueCallback&& callback, const Value* value, const Failure* failure) {
  if (failure) {
    output_.calls.emplace_back(
        [callback = std::move(callback), failure = *failure] { callback(nullptr, &failure); });
  } else {
    output_.calls.emplace_back(
        [callback = std::move(callback), value = *value] { callback(&value, nullptr); });
  }
}

// --- the end ---

void Machine::end_users(const Failure& why) {
  std::vector<Entry*> entries;
  for (const auto& [key, known] : parties_) {
    for (const auto& [id, entry] : known->users) entries.push_back(entry);
  }
  for (Entry* const entry : entries) {
    Failure failure = why;
    failure.text = concat(describe(entry->id), " was deleted: ", why.text);
    die(*entry, failure, /*is_lost=*/true);
  }
}

void Machine::close(const Failure& why) {
  if (closed_) return;
  closed_ = true;
  closed_why_ = why;
  local_.clear();
  end_users(why);
  for (const auto& [key, known] : parties_) {
    std::vector<std::uint64_t> numbers;
    for (const auto& [number, sent] : known->passages) numbers.push_back(number);
    for (const std::uint64_t number : numbers) end_passage(*known, number, /*taken=*/false);
    known->requests.clear();
    known->unsettled.clear();
    known->to_ask.clear();
  }
  std::vector<Entry*> entries;
  for (const auto& [id, entry] : owned_) entries.push_back(entry);
  for (Entry* const entry : entries) {
    entry->forks.clear();
    if (entry->state == EntryState::kExpected || entry->state == EntryState::kRunning) {
      Failure failure = why;
      failure.text = concat(describe(entry->id), " was deleted: ", why.text);
      fail_expected(*entry, failure);
    } else {
      free_if_unused(*entry);
    }
  }
}

bool Machine::settled() const {
  if (closed_) return true;
  return std::all_of(parties_.begin(), parties_.end(), [](const auto& known) {
    const Party& other = *known.second;
    return other.lost || (other.link.idle() && other.passages.empty() && other.requests.empty() &&
                          other.unsettled.empty());
  });
}

bool Machine::drained() const {
  return settled() && std::all_of(owned_.begin(), owned_.end(), [](const auto& entry) {
           return entry.second->forks.empty() && entry.second->state != EntryState::kExpected;
         });
}

std::vector<std::string> Machine::holders() const {
  std::vector<std::string> lines;
  for (const auto& [id, entry] : owned_) {
    if (entry->forks.empty()) continue;
    std::string text = concat(describe(id), " is held by ");
    for (std::size_t i = 0; i < entry->forks.size(); ++i) {
      text += concat(i == 0 ? "" : ", ", name_of(entry->forks[i].user->worker));
    }
    lines.push_back(std::move(text));
  }
  std::sort(lines.begin(), lines.end());
  return lines;
}

std::vector<std::string> Machine::unsettled() const {
  std::vector<std::string> lines;
  for (const auto& [worker, known] : current_) {
    if (known->lost) continue;
    for (const auto& [number, sent] : known->passages) {
      lines.push_back(concat(describe(sent.id), " is on its way to ", name_of(worker)));
    }
    for (const auto& [number, entry] : known->requests) {
      lines.push_back(concat(describe(entry->id), " waits for its owner ", name_of(worker)));
    }
    if (!known->link.idle()) lines.push_back(concat(name_of(worker), " has not answered"));
  }
  std::sort(lines.begin(), lines.end());
  return lines;
}

DebugInfo Machine::debug_info() const {
  DebugInfo info;
  for (const auto& [id, entry] : owned_) {
    if (entry->registered || !entry->forks.empty()) ++info.num_owner_rrefs;
    info.num_forks += entry->forks.size();
    if (entry->waiters) info.num_pending_futures += entry->waiters->value.size();
  }
  for (const auto& [key, known] : parties_) {
    for (const auto& [id, entry] : known->users) {
      if (entry->state != EntryState::kConfirmed) ++info.num_pending_users;
      if (entry->state == EntryState::kCreating) ++info.num_pending_futures;
    }
  }
  return info;
}

std::size_t Machine::users() const {
  std::size_t count = 0;
  for (const auto& [key, known] : parties_) count += known->users.size();
  return count;
}

}  // namespace convoy::rref
