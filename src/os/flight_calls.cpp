#include "os/flight_calls.h"

#include <algorithm>

#include "base/concat.h"
#include "base/duration.h"
#include "os/flight_dump.h"

namespace convoy::flight {
namespace {

using std::chrono::nanoseconds;

// A caller hears of a death a little before the launcher does.
constexpr std::chrono::seconds kNoticed(1);

bool call_is_over(const Entry& entry) { return entry.over(); }

std::string since_then(nanoseconds time) { return format_duration(std::max(nanoseconds(), time)); }

std::string function_and_number(const Entry& entry) {
  if (entry.pass) return concat(entry.operation, " ", entry.number);
  return entry.peer < 0 ? entry.operation : concat(entry.operation, ", call ", entry.number);
}

// What the callee has of a call that was sent.
std::string state_there(const Calls& calls, const Log& log, const Entry& entry, nanoseconds now) {
  const auto [other, found] = calls.other(log, entry);
  if (!other) return "";
  if (!found) {
    // Calls that are over may be forgotten, those under way are not.
    const bool forgets =
        std::any_of(other->calls.begin(), other->calls.end(), call_is_over) &&
        other->calls.front().ticket > 1 &&
        std::find_if(other->calls.begin(), other->calls.end(), call_is_over)->created >
            entry.created;
    return forgets ? "" : "; it has not come there";
  }
  switch (found->state) {
    case State::kScheduled:
      return concat("; it is queued there since ", since_then(now - found->created));
    case State::kStarted: return concat("; it runs there since ", since_then(now - found->started));
    default: return concat("; it was answered there ", since_then(now - found->ended), " ago");
  }
}

// Of something that all workers of a session do together: who does not do it yet.
std::string who_is_missing(const Calls& calls, const Log& log, const Entry& entry) {
  const GroupEntry* const session = log.group_of(entry);
  if (!session || entry.operation.find(" of ") != std::string::npos) return "";
  std::string names;
  for (const Log& other : calls.job()) {
    for (const auto& [id, group] : other.groups) {
      if (group.session != session->session) continue;
      const bool came =
          std::any_of(other.calls.begin(), other.calls.end(), [&, number = id](const Entry& one) {
            return one.group == number && one.peer < 0 && one.operation == entry.operation &&
                   !one.over();
          });
      if (!came) names += concat(names.empty() ? "" : ", ", group.name);
    }
  }
  if (names.empty()) return "";
  return concat("; ", names, names.find(',') == names.npos ? " has" : " have", " not come");
}

// A worker's part in a backward pass.
std::string part_of_pass(const Entry& entry, nanoseconds now) {
  switch (entry.state) {
    case State::kScheduled: return entry.served ? "waits for gradients" : "waits for others";
    case State::kStarted: return concat("runs since ", since_then(now - entry.started));
    case State::kCompleted: return "is done";
    default: return "has failed";
  }
}

// "backward pass 3 since 12 s, waits for gradients; worker1 runs since 11 s; worker2 is done"
std::string pass_line(const Log& log, const Entry& entry, const Calls& calls, nanoseconds now) {
  std::string text =
      concat(worker_of(log, entry), ": ", function_and_number(entry),
             entry.served ? concat(" of ", peer_of(log, entry)) : std::string(), " since ",
             since_then(now - entry.created), ", ", part_of_pass(entry, now));
  if (entry.served) return text;
  for (const auto& [other, part] : calls.parts(log, entry)) {
    const GroupEntry* const group = other->group_of(*part);
    text += concat("; ", group ? group->name : "another", " ", part_of_pass(*part, now));
  }
  return text;
}

std::string call_line(const Log& log, const Entry& entry, const Calls& calls, nanoseconds now) {
  if (entry.pass) return pass_line(log, entry, calls, now);
  const std::string who = worker_of(log, entry);
  const std::string peer = peer_of(log, entry);
  if (entry.served) {
    const bool runs = entry.state == State::kStarted;
    return concat(who, runs ? ": runs since " : ": has queued since ",
                  since_then(now - (runs ? entry.started : entry.created)), " for ", peer, ": ",
                  function_and_number(entry));
  }
  const std::string text = concat(who, ": waits since ", since_then(now - entry.created), " for ",
                                  peer, ": ", function_and_number(entry));
  if (entry.peer < 0) return text + who_is_missing(calls, log, entry);
  return text + (entry.state == State::kScheduled ? ", which has not been sent yet"
                                                  : state_there(calls, log, entry, now));
}

Calls::Side part_in(const std::vector<Calls::Side>& parts, const Log& log) {
  const auto found =
      std::find_if(parts.begin(), parts.end(), [&](const auto& part) { return part.log == &log; });
  return found == parts.end() ? Calls::Side() : *found;
}

// Those that waited for longest, and how many there are more.
std::vector<std::string> first_lines(std::vector<std::pair<nanoseconds, std::string>> lines,
                                     std::size_t most) {
  std::stable_sort(lines.begin(), lines.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<std::string> texts;
  for (std::size_t i = 0; i < std::min(most, lines.size()); ++i) {
    texts.push_back(std::move(lines[i].second));
  }
  if (lines.size() > most) texts.push_back(concat("and ", lines.size() - most, " more"));
  return texts;
}

}  // namespace

std::size_t Calls::Hash::operator()(const Key& key) const {
  const auto ranks = static_cast<std::uint64_t>(key.rank) << 33 |
                     static_cast<std::uint64_t>(key.peer) << 1 | (key.served ? 1 : 0);
  return (key.session ^ ranks) * 0x9e3779b97f4a7c15 + key.number * 0xc2b2ae3d27d4eb4f;
}

std::optional<Calls::Key> Calls::key_of(const Log& log, const Entry& entry) {
  const GroupEntry* const group = log.group_of(entry);
  if (!group || group->session == 0 || entry.peer < 0 || entry.pass) return std::nullopt;
  return Key{group->session, group->rank, entry.peer, entry.served, entry.number};
}

Calls::Calls(const std::vector<Log>& job) : job_(job) {
  for (const Log& log : job) {
    for (const Entry& entry : log.calls) {
      if (const auto key = key_of(log, entry)) sides_.insert_or_assign(*key, Side{&log, &entry});
    }
  }
}

Calls::Side Calls::other(const Log& log, const Entry& entry) const {
  auto key = key_of(log, entry);
  if (!key) return {};
  std::swap(key->rank, key->peer);
  key->served = !key->served;
  if (const auto found = sides_.find(*key); found != sides_.end()) return found->second;
  for (const Log& one : job_) {
    for (const auto& [id, group] : one.groups) {
      if (group.session == key->session && group.rank == key->rank) return {&one, nullptr};
    }
  }
  return {};
}

std::vector<Calls::Side> Calls::parts(const Log& log, const Entry& pass) const {
  std::vector<Side> found;
  const GroupEntry* const root = log.group_of(pass);
  if (!root || !pass.pass || pass.served) return found;
  for (const Log& other : job_) {
    for (const Entry& entry : other.calls) {
      if (!entry.pass || !entry.served || entry.number != pass.number) continue;
      const GroupEntry* const group = other.group_of(entry);
      if (!group || group->session != root->session || entry.peer != root->rank) continue;
      found.push_back({&other, &entry});
    }
  }
  const auto rank_of = [](const Side& side) { return side.log->group_of(*side.entry)->rank; };
  std::stable_sort(found.begin(), found.end(),
                   [&](const Side& a, const Side& b) { return rank_of(a) < rank_of(b); });
  return found;
}

bool Calls::has_root(const Log& log, const Entry& part) const {
  const GroupEntry* const group = log.group_of(part);
  if (!group) return false;
  return std::any_of(job_.begin(), job_.end(), [&](const Log& other) {
    return std::any_of(other.calls.begin(), other.calls.end(), [&](const Entry& entry) {
      if (!entry.pass || entry.served || entry.over() || entry.number != part.number) return false;
      const GroupEntry* const root = other.group_of(entry);
      return root && root->session == group->session && root->rank == part.peer;
    });
  });
}

std::string worker_of(const Log& log, const Entry& entry) {
  const GroupEntry* const group = log.group_of(entry);
  const std::string rank = log.rank ? concat("rank ", *log.rank) : concat("pid ", log.pid);
  return group && !group->name.empty() ? concat(group->name, " (", rank, ")") : rank;
}

std::string peer_of(const Log& log, const Entry& entry) {
  if (entry.peer < 0) return "others";
  const GroupEntry* const group = log.group_of(entry);
  const auto rank = static_cast<std::size_t>(entry.peer);
  if (group && rank < group->workers.size() && !group->workers[rank].empty()) {
    return group->workers[rank];
  }
  return concat("worker ", rank);
}

std::vector<std::string> calls_under_way(const Log& log, const Calls& calls, std::size_t most,
                                         nanoseconds now) {
  std::vector<std::pair<nanoseconds, std::string>> lines;
  for (const Entry& entry : log.calls) {
    if (!entry.over()) lines.emplace_back(entry.created, call_line(log, entry, calls, now));
  }
  return first_lines(std::move(lines), most);
}

std::vector<std::string> calls_under_way(const Calls& calls, std::size_t most, nanoseconds now,
                                         nanoseconds least) {
  std::vector<std::pair<nanoseconds, std::string>> lines;
  for (const Log& log : calls.job()) {
    for (const Entry& entry : log.calls) {
      if (entry.over() || now - entry.created < least) continue;
      // It is in the line of whoever waits for it.
      if (entry.served && calls.other(log, entry).entry) continue;
      if (entry.served && entry.pass && calls.has_root(log, entry)) continue;
      lines.emplace_back(entry.created, call_line(log, entry, calls, now));
    }
  }
  return first_lines(std::move(lines), most);
}

std::vector<std::string> last_calls(const Log& log, std::size_t most, nanoseconds now) {
  std::vector<const Entry*> over;
  for (const Entry& entry : log.calls) {
    if (entry.over()) over.push_back(&entry);
  }
  std::stable_sort(over.begin(), over.end(),
                   [](const Entry* a, const Entry* b) { return a->ended < b->ended; });
  std::vector<std::string> lines;
  for (std::size_t i = over.size() - std::min(most, over.size()); i < over.size(); ++i) {
    const Entry& entry = *over[i];
    const bool failed = entry.state == State::kFailed;
    const std::string what =
        !entry.pass ? concat(entry.served ? ": ran for " : ": called ", peer_of(log, entry), ": ")
        : entry.served ? concat(": for ", peer_of(log, entry), ": ")
                       : std::string(": ");
    lines.push_back(concat(worker_of(log, entry), what, function_and_number(entry),
                           failed       ? ", failed after "
                           : entry.pass ? ", done in "
                                        : ", answered in ",
                           short_time(std::max(nanoseconds(), entry.ended - entry.created)), ", ",
                           short_time(std::max(nanoseconds(), now - entry.ended)), " ago"));
  }
  return lines;
}

std::vector<std::string> who_called(const Log& log, const Calls& calls, std::size_t most,
                                    nanoseconds end) {
  std::vector<std::pair<nanoseconds, std::string>> lines;
  for (const Log& other : calls.job()) {
    if (&other == &log || other.pid == log.pid) continue;
    for (const Entry& entry : other.calls) {
      if (entry.served || entry.created > end || entry.state == State::kCompleted) continue;
      if (entry.state == State::kFailed && entry.ended < end - kNoticed) continue;
      const auto [callee, found] =
          entry.pass ? part_in(calls.parts(other, entry), log) : calls.other(other, entry);
      if (callee != &log) continue;
      const char* const state = !found || found->state == State::kScheduled ? ""
                                : found->state == State::kStarted           ? ", which ran there"
                                                                            : ", which was over";
      lines.emplace_back(entry.created,
                         concat(worker_of(other, entry), " since ", since_then(end - entry.created),
                                ": ", function_and_number(entry), state));
    }
  }
  return first_lines(std::move(lines), most);
}

}  // namespace convoy::flight
