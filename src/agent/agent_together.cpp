// Agents: what all do together, and how a session ends.
#include <algorithm>

#include "agent/agent_impl.h"
#include "base/duration.h"
#include "base/error.h"
#include "base/log.h"
#include "base/wire.h"

namespace convoy::agent {
namespace {

constexpr std::size_t kMostGatherHead = 4096;
// That others have begun, and this worker has not.
constexpr std::size_t kMostGathers = std::size_t{1} << 16;
constexpr std::size_t kMostNamed = 8;
// Who waits so long for a value asks for it, and then less and less often: letters may get lost on
// endpoints of some kinds.
constexpr std::chrono::milliseconds kAskAfter(100);
constexpr std::chrono::milliseconds kMostAskAfter(10'000);
// Longer ones are not kept for those who ask when it is over.
constexpr std::size_t kMostKeptValue = std::size_t{64} << 10;

// Names of some workers: "worker1, worker2".
class NameList {
 public:
  void add(const std::string& name) {
    if (++count_ <= kMostNamed) text_ += concat(text_.empty() ? "" : ", ", name);
  }
  std::size_t count() const { return count_; }
  std::string text() const {
    return count_ <= kMostNamed ? text_ : concat(text_, " and ", count_ - kMostNamed, " more");
  }

 private:
  std::string text_;
  std::size_t count_ = 0;
};

}  // namespace

// --- gathers ---

void Agent::hear_gather(Peer& peer, transport::Arrival& arrival) {
  const auto head = decode_head<GatherHead>(arrival.head, "value for all");
  const auto bytes =
      arrival.parts.empty() ? arrival.head.subspan(sizeof head) : arrival.parts[0].bytes;
  {
    auto gathers = gathers_->state.lock();
    const auto begun = gathers->begun.find(head.group);
    // It has ended here.
    if (begun != gathers->begun.end() && head.number <= begun->second &&
        !gathers->values.contains({head.group, head.number})) {
      return;
    }
    if (gathers->values.size() >= kMostGathers) {
      fail(ErrorKind::kInvalidArgument, "values for too many groups of workers");
    }
    gathers->values[{head.group, head.number}].try_emplace(
        peer.worker.id, reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  endpoint_->wake();
}

void Agent::hear_gather_ask(Peer& peer, const transport::Arrival& arrival) {
  const auto head = decode_head<GatherHead>(arrival.head, "question for a value");
  if (arrival.head.size() != sizeof head || !arrival.parts.empty()) {
    fail(ErrorKind::kInvalidArgument, "malformed question for a value: there is more behind it");
  }
  std::string mine;
  {
    auto gathers = gathers_->state.lock();
    const auto under_way = gathers->values.find({head.group, head.number});
    const auto last = gathers->last.find(head.group);
    if (under_way != gathers->values.end() && under_way->second.contains(options_.rank)) {
      mine = under_way->second.at(options_.rank);
    } else if (last != gathers->last.end() && last->second.number == head.number) {
      mine = last->second.value;
    } else {
      return;  // it has not begun here: the value comes when it does
    }
  }
  {
    // What waits for room is enough: whoever asks asks again.
    const std::scoped_lock lock(peer.mutex);
    if (!peer.outbox.is_empty()) return;
  }
  send_value(peer, head, mine);
}

// Who does not get it now asks for it.
void Agent::send_value(Peer& peer, const GatherHead& head, std::string_view value) {
  Lock lock(peer.mutex);
  if (peer.contact.lost) return;
  const auto bytes = std::as_bytes(std::span(value));
  const Piece piece{bytes};
  Outgoing outgoing;
  if (bytes.size() <= kMostGatherHead) {
    outgoing.body = bytes;
  } else {
    outgoing.pieces = {&piece, 1};
  }
  try {
    send(peer, lock, LetterType::kGather, std::as_bytes(std::span(&head, 1)), outgoing);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kResource) throw;
    log_warn("rpc, ", options_.name, ": a value for ", peer.worker.name,
             " cannot be sent now: ", error.what());
  }
}

void Agent::ask_for_value(Peer& peer, const GatherHead& head) noexcept {
  Lock lock(peer.mutex);
  if (!peer.contact.open || !peer.outbox.queues[0].empty()) return;
  Outgoing nothing;
  try {
    send(peer, lock, LetterType::kGatherAsk, std::as_bytes(std::span(&head, 1)), nothing);
  } catch (const Error&) {
    // the next time
  }
}

// What the flight record calls it.
std::string Agent::together(const char* what, std::size_t workers) const {
  return workers == roster_.peers().size() ? what : concat(what, " of ", workers, " workers");
}

std::vector<std::string> Agent::all_gather(std::string_view mine, std::span<const WorkerId> who,
                                           const Deadline& deadline) {
  require_home();
  if (ending_.closed.load())
    fail(ErrorKind::kInvalidArgument, options_.name, " has been shut down");
  std::vector<WorkerId> sorted(who.begin(), who.end());
  std::sort(sorted.begin(), sorted.end());
  for (const WorkerId id : sorted) peer(id);
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end() ||
      !std::binary_search(sorted.begin(), sorted.end(), options_.rank)) {
    fail(ErrorKind::kInvalidArgument, "all_gather: the list must name ", options_.name,
         ", and each worker once");
  }
  const CallRecord::Together note(record_, together("all_gather", sorted.size()));
  // What may fail comes first: what has not begun here counts for nobody.
  for (const WorkerId id : sorted) {
    Peer& other = peer(id);
    if (id != options_.rank && !other.remote.load(std::memory_order_acquire)) connect(other);
  }
  GatherHead head{.group = hash_bytes(std::as_bytes(std::span(sorted)))};
  {
    auto gathers = gathers_->state.lock();
    head.number = ++gathers->begun[head.group];
    gathers->values[{head.group, head.number}].emplace(options_.rank, mine);
  }
  const Gathers::Key key{head.group, head.number};
  // However it ends.
  struct Forget {
    Gathers& gathers;
    const Gathers::Key& key;
    ~Forget() { gathers.state.lock()->values.erase(key); }
  } const forget{*gathers_, key};
  try {
    for (const WorkerId id : sorted) {
      if (id != options_.rank) send_value(peer(id), head, mine);
    }
  } catch (const Error&) {  // it can be sent to nobody
    --gathers_->state.lock()->begun[head.group];
    throw;
  }
  // Who has not come: those who may, and those who never will.
  const auto missing = [&](NameList& late, NameList& gone) {
    auto gathers = gathers_->state.lock();
    const auto& values = gathers->values[key];
    for (const WorkerId id : sorted) {
      if (values.contains(id)) continue;
      (is_lost(id) ? gone : late).add(peer(id).worker.name);
    }
  };
  const auto ready = [&] {
    NameList late;
    NameList gone;
    missing(late, gone);
    return late.count() == 0 || gone.count() != 0 || ending_.closed.load();
  };
  bool in_time = false;
  for (auto patience = kAskAfter;; patience = std::min(2 * patience, kMostAskAfter)) {
    const auto until = now() + patience;
    const bool last = !deadline.is_never() && deadline.when() <= until;
    in_time = wait_aside(last ? deadline : Deadline::at(until), ready);
    if (in_time || last) break;
    for (const WorkerId id : sorted) {
      if (!gathers_->state.lock()->values[key].contains(id)) ask_for_value(peer(id), head);
    }
  }
  NameList late;
  NameList gone;
  missing(late, gone);
  std::vector<std::string> result;
  if (late.count() + gone.count() == 0) {
    auto gathers = gathers_->state.lock();
    auto& values = gathers->values[key];
    for (const WorkerId id : who) result.push_back(std::move(values.at(id)));
    // For those who have not had it yet; none of them can be further behind.
    gathers->last.erase(head.group);
    if (mine.size() <= kMostKeptValue) {
      gathers->last[head.group] = {head.number, std::string(mine)};
    }
    return result;
  }
  if (gone.count() != 0) {
    fail(ErrorKind::kPeerLost, "all_gather of ", sorted.size(), " workers, ", options_.name, ": ",
         gone.text(), gone.count() == 1 ? " is lost or has left" : " are lost or have left");
  }
  if (in_time) fail(ErrorKind::kCancelled, "all_gather: ", options_.name, " was shut down");
  fail(ErrorKind::kTimeout, "all_gather of ", sorted.size(), " workers, ", options_.name,
       ": timed out waiting for ", late.text());
}

void Agent::barrier(std::span<const WorkerId> who, const Deadline& deadline) {
  const CallRecord::Together note(record_, together("barrier", who.size()));
  all_gather({}, who, deadline);
}

// --- the end ---

std::vector<std::string> Agent::under_way() const {
  require_home();
  std::vector<std::string> lines;
  const auto now = quick_now();
  for (const auto& known : roster_.peers()) {
    const std::scoped_lock lock(known->mutex);
    for (const Call* call = known->calls.first; call; call = call->after_) {
      lines.push_back(concat("call of ", declared_function(call->function_).name, " to ",
                             known->worker.name, " since ", format_duration(now - call->started_)));
    }
    for (const Request* request = known->requests.first; request; request = request->after_) {
      lines.push_back(concat(request->function_name(), " for ", known->worker.name, " since ",
                             format_duration(now - request->arrived_)));
    }
  }
  return lines;
}

// Waits until this worker has nothing under way, then compares with the others: if nobody has begun
// anything since they said so the last time, there is nothing that could begin anything.
bool Agent::is_idle() {
  const bool calls =
      std::all_of(roster_.peers().begin(), roster_.peers().end(), [](const auto& known) {
        const std::scoped_lock lock(known->mutex);
        return known->calls.count == 0 && known->requests.count == 0;
      });
  return calls && listeners_.are_idle();
}

std::string Agent::describe_under_way() {
  auto lines = under_way();
  for (const auto& companion : listeners_.companions) {
    for (std::string& line : companion->under_way()) lines.push_back(std::move(line));
  }
  std::string text;
  for (std::size_t i = 0; i < lines.size() && i < kMostNamed; ++i) {
    text += concat(i == 0 ? "" : "; ", lines[i]);
  }
  if (lines.size() > kMostNamed) text += concat("; ", lines.size() - kMostNamed, " more");
  return text;
}

// False: it was shut down meanwhile.
bool Agent::settle(const Deadline& deadline) {
  std::vector<WorkerId> everybody;
  for (const auto& known : roster_.peers()) everybody.push_back(known->worker.id);
  // Of what all said in the round before: the same for all who were in it. Whoever decides does so
  // by what it is told in one round, so all decide alike.
  std::uint64_t before = 0;
  for (;;) {
    // Answers tell us only now: they would wake us for each of them while we wait for the others.
    ending_.awaits_idle.fetch_add(1);
    const bool idle = wait_aside(deadline, [&] { return ending_.closed.load() || is_idle(); });
    ending_.awaits_idle.fetch_sub(1);
    if (!idle) {
      fail(ErrorKind::kTimeout, "shutdown of ", options_.name,
           ": timed out; under way: ", describe_under_way());
    }
    if (ending_.closed.load()) return false;
    if (roster_.grows()) return true;  // the others go on
    std::string mine;
    WireWriter writer(mine);
    std::uint64_t taken = counts_.taken.load();
    taken += listeners_.activity();
    writer.put(counts_.started.load());
    writer.put(taken);
    writer.put(before);
    std::vector<std::string> now;
    try {
      now = all_gather(mine, everybody, deadline);
    } catch (const Error& error) {
      const std::string text = describe_under_way();
      fail(error.kind(), "shutdown of ", options_.name, ": ", error.what(),
           text.empty() ? "" : "; meanwhile: ", text);
    }
    // What they said is of a moment when they were idle.
    std::string counts;
    std::vector<std::uint64_t> seen_before;
    for (const std::string& value : now) {
      WireReader reader(value, "state of a worker");
      counts += reader.take(2 * sizeof(std::uint64_t));
      seen_before.push_back(reader.take<std::uint64_t>());
    }
    before = hash_text(counts, /*seed=*/1);
    const bool same = std::all_of(seen_before.begin(), seen_before.end(),
                                  [&](std::uint64_t value) { return value == before; });
    if (same) return true;
  }
}

void Agent::shutdown(const Deadline& deadline) {
  require_home();
  if (ending_.closed.load()) return;
  if (in_own_thread()) {
    fail(ErrorKind::kInvalidArgument, options_.name,
         ": shutdown cannot be called in a handler: it waits for all of them");
  }
  const CallRecord::Together note(record_, "shutdown");
  ending_.draining.store(true);
  // If it throws, the session goes on.
  struct Undo {
    std::atomic<bool>& draining;
    bool done = false;
    ~Undo() {
      if (!done) draining.store(false);
    }
  } undo{ending_.draining};
  if (!settle(deadline)) return;
  if (!listeners_.companions.empty()) {
    listeners_.finish();
    if (!settle(deadline)) return;
  }
  // Others may wait for what has not gone yet.
  wait_aside(deadline, [&] {
    return std::all_of(roster_.peers().begin(), roster_.peers().end(), [](const auto& known) {
      const std::scoped_lock lock(known->mutex);
      return known->outbox.is_empty() && !known->outbox.flushing;
    });
  });
  undo.done = true;
  abort();
}

void Agent::abort() noexcept {
  if (!home_.is_here()) return;
  if (!roster_.has_begun()) {
    if (ending_.closed.exchange(true)) return;
    listeners_.tell_closed();
    return;
  }
  for (const auto& known : roster_.peers()) {
    Peer& peer = *known;
    // It would end its own calls, as those to who has left.
    if (peer.worker.id == options_.rank) continue;
    Lock lock(peer.mutex);
    if (peer.contact.lost || !peer.contact.open || ending_.closed.load()) continue;
    Outgoing nothing;
    try {
      send(peer, lock, LetterType::kGoodbye, {}, nothing);
    } catch (const Error&) {
      // It hears that the endpoint is closed.
    }
  }
  if (ending_.closed.exchange(true)) return;
  Ended ended;
  for (const auto& known : roster_.peers()) {
    Peer& peer = *known;
    const std::scoped_lock lock(peer.mutex);
    while (Call* const call = peer.calls.first) {
      peer.count_error(*call);
      record_.ended(call->ticket_, CallRecord::End::kFailed, quick_now());
      ended.calls.emplace_back(
          call, failure_of(*call, ErrorKind::kCancelled, concat(options_.name, " was shut down")));
      peer.calls.unlink(*call);
    }
    for (auto& queue : peer.outbox.queues) {
      for (QueuedLetter& letter : std::exchange(queue, {})) {
        ended.letters.emplace_back(std::move(letter.on_sent), "the session was shut down");
      }
    }
    peer.requests.cancel_all();
  }
  ended.tell();
  listeners_.tell_closed();
  endpoint_->wake();
}

// --- what it did ---

AgentStats Agent::stats() const {
  require_home();
  AgentStats stats;
  for (const auto& known : roster_.peers()) {
    const std::scoped_lock lock(known->mutex);
    for (std::size_t id = 0; id < known->counters.size(); ++id) {
      const FunctionStats& counters = known->counters[id];
      if (counters.calls == 0 && counters.served == 0) continue;
      FunctionStats& entry = stats.functions.emplace_back(counters);
      entry.worker = known->worker.name;
      entry.function = declared_function(static_cast<FunctionId>(id)).name;
    }
    stats.outstanding += known->calls.count;
    stats.requests += known->requests.count;
  }
  stats.executor = executor_.stats();
  stats.inline_runs = counts_.inline_runs.load();
  stats.takeovers = counts_.takeovers.load();
  return stats;
}

std::chrono::nanoseconds Histogram::quantile(double share) const {
  const auto wanted = static_cast<double>(total()) * share;
  double seen = 0;
  for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
    seen += static_cast<double>(counts[bucket]);
    if (seen >= wanted && seen > 0) return std::chrono::nanoseconds(std::int64_t{1} << bucket);
  }
  return {};
}

}  // namespace convoy::agent
