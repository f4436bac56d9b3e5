// Flight records as a Chrome trace.
#include <algorithm>

#include "base/chrome_trace.h"
#include "base/concat.h"
#include "base/quote.h"
#include "os/flight_calls.h"

namespace convoy::flight {
namespace {

using std::chrono::nanoseconds;
using Time = ChromeTrace::Time;

Time trace_time(nanoseconds time) { return Time(std::chrono::duration_cast<Time::duration>(time)); }

const char* state_text(const Entry& entry) {
  switch (entry.state) {
    case State::kCompleted: return "completed";
    case State::kFailed: return "failed";
    case State::kScheduled: return "queued";
    default: return "under way";
  }
}

// Lanes in which nothing overlaps: "calls", "calls 2", ... Asked in the order of `from`.
class Lanes {
 public:
  explicit Lanes(std::string name) : name_(std::move(name)) {}

  std::string at(nanoseconds from, nanoseconds to) {
    std::size_t lane = 0;
    while (lane < free_.size() && free_[lane] > from) ++lane;
    if (lane == free_.size()) free_.emplace_back();
    free_[lane] = std::max(to, from + nanoseconds(1));
    return lane == 0 ? name_ : concat(name_, " ", lane + 1);
  }

 private:
  std::string name_;
  std::vector<nanoseconds> free_;
};

// An entry, where it is drawn.
struct Drawn {
  const Entry* entry;
  nanoseconds from;
  nanoseconds to;
  std::string lane;
};

// The two ends of the arrows between a call and its run. Clocks agree to a microsecond: nothing
// begins before it was sent, or is answered after the caller had the answer.
struct Arrows {
  nanoseconds sent;
  nanoseconds begun;
  nanoseconds answered;
  nanoseconds heard;

  Arrows(const Entry& made, const Entry& served)
      : sent(std::max(made.started, made.created)),
        begun(std::max({served.started, served.created, sent})),
        answered(std::min(served.ended, made.ended)),
        heard(made.ended) {}
};

// What one rank did, by the time of its beginning, in lanes.
std::vector<Drawn> draw(const std::vector<Entry>& entries, nanoseconds now) {
  std::vector<Drawn> all;
  for (const Entry& entry : entries) {
    const nanoseconds from = entry.created;
    all.push_back({&entry, from, std::max(from, entry.over() ? entry.ended : now), ""});
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const Drawn& a, const Drawn& b) { return a.from < b.from; });
  return all;
}

std::string process_title(const Log& log) {
  std::string names;
  for (const auto& [id, group] : log.groups) {
    if (group.session != 0) names += concat(names.empty() ? ": " : ", ", group.name);
  }
  return concat(log.rank ? concat("rank ", *log.rank) : concat("pid ", log.pid), names);
}

class Tracer {
 public:
  Tracer(const std::vector<Log>& job, nanoseconds now) : job_(job), calls_(job), now_(now) {
    for (const Log& log : job) {
      for (const Entry& entry : log.calls) {
        if (!entry.served) numbers_.emplace(&entry, 2 * numbers_.size());
      }
    }
  }

  std::string process(const Log& log) {
    ChromeTrace trace(log.rank.value_or(static_cast<int>(&log - job_.data())), process_title(log));
    Lanes operations("collectives");
    for (Drawn& drawn : draw(log.entries, now_)) {
      trace.span(
          operations.at(drawn.from, drawn.to), describe(log, *drawn.entry), trace_time(drawn.from),
          trace_time(drawn.to),
          concat("\"state\":\"", state_text(*drawn.entry), "\",\"bytes\":", drawn.entry->bytes,
                 ",\"place\":", quote_json(describe_place(*drawn.entry))));
    }
    Lanes made("calls");
    Lanes served("handlers");
    for (Drawn& drawn : draw(log.calls, now_)) {
      drawn.lane = (drawn.entry->served ? served : made).at(drawn.from, drawn.to);
      if (drawn.entry->pass) {
        add_pass(trace, log, drawn);
      } else if (drawn.entry->served) {
        add_served(trace, log, drawn);
      } else {
        add_made(trace, log, drawn);
      }
    }
    return trace.text();
  }

 private:
  std::string args_of(const Log& log, const Entry& entry) const {
    return concat("\"state\":\"", state_text(entry), "\",\"call\":", entry.number,
                  ",\"worker\":", quote_json(worker_of(log, entry)),
                  entry.served ? ",\"for\":" : ",\"to\":", quote_json(peer_of(log, entry)));
  }

  // A part of it waits and runs by turns.
  void add_pass(ChromeTrace& trace, const Log& log, const Drawn& drawn) const {
    const Entry& entry = *drawn.entry;
    trace.span(drawn.lane,
               concat(entry.operation, " ", entry.number,
                      entry.served ? concat(" <- ", peer_of(log, entry)) : std::string()),
               trace_time(drawn.from), trace_time(drawn.to), args_of(log, entry));
  }

  // From its call to its answer; the arrow begins when it was sent.
  void add_made(ChromeTrace& trace, const Log& log, const Drawn& drawn) const {
    const Entry& entry = *drawn.entry;
    trace.span(drawn.lane, concat(entry.operation, " -> ", peer_of(log, entry)),
               trace_time(drawn.from), trace_time(drawn.to), args_of(log, entry));
    const auto there = calls_.other(log, entry);
    if (!there.entry || there.entry->started == nanoseconds::zero()) return;
    const std::uint64_t number = numbers_.at(&entry);
    const Arrows arrows(entry, *there.entry);
    trace.arrow(ChromeTrace::Arrow::kBegin, drawn.lane, "call", number, trace_time(arrows.sent));
    if (entry.state == State::kCompleted && there.entry->over()) {
      trace.arrow(ChromeTrace::Arrow::kEnd, drawn.lane, "answer", number + 1,
                  trace_time(arrows.heard));
    }
  }

  // In the queue, then on a thread.
  void add_served(ChromeTrace& trace, const Log& log, const Drawn& drawn) const {
    const Entry& entry = *drawn.entry;
    const bool runs = entry.started != nanoseconds::zero();
    const nanoseconds begun = runs ? std::clamp(entry.started, drawn.from, drawn.to) : drawn.to;
    if (begun > drawn.from) {
      trace.span(drawn.lane, "queued", trace_time(drawn.from), trace_time(begun),
                 args_of(log, entry));
    }
    if (!runs) return;
    trace.span(drawn.lane, concat(entry.operation, " <- ", peer_of(log, entry)), trace_time(begun),
               trace_time(drawn.to), args_of(log, entry));
    const auto caller = calls_.other(log, entry);
    if (!caller.entry) return;
    const std::uint64_t number = numbers_.at(caller.entry);
    const Arrows arrows(*caller.entry, entry);
    trace.arrow(ChromeTrace::Arrow::kEnd, drawn.lane, "call", number, trace_time(arrows.begun));
    if (caller.entry->state == State::kCompleted && entry.over()) {
      trace.arrow(ChromeTrace::Arrow::kBegin, drawn.lane, "answer", number + 1,
                  trace_time(arrows.answered));
    }
  }

  const std::vector<Log>& job_;
  const Calls calls_;
  const nanoseconds now_;
  std::unordered_map<const Entry*, std::uint64_t> numbers_;
};

}  // namespace

std::string to_trace(const std::vector<Log>& job, nanoseconds now) {
  Tracer tracer(job, now);
  std::vector<std::string> processes;
  for (const Log& log : job) processes.push_back(tracer.process(log));
  return chrome_trace(processes);
}

}  // namespace convoy::flight
