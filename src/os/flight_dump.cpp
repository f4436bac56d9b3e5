#include "os/flight_dump.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>

#include "base/concat.h"
#include "base/duration.h"
#include "base/quote.h"
#include "os/file.h"
#include "os/flight_calls.h"

namespace convoy::flight {
namespace {

using std::chrono::nanoseconds;

// --- a value, and the two ways to write it ---

struct Value;
using List = std::vector<Value>;
using Dict = std::vector<std::pair<std::string, Value>>;

struct Value {
  enum class Shape { kNone, kBool, kNumber, kText, kList, kTuple, kDict };

  Value() = default;
  Value(bool is) : shape(Shape::kBool), number(is ? 1 : 0) {}
  Value(std::int64_t is) : shape(Shape::kNumber), number(is) {}
  Value(std::uint64_t is) : shape(Shape::kNumber), number(static_cast<std::int64_t>(is)) {}
  Value(int is) : shape(Shape::kNumber), number(is) {}
  Value(std::string is) : shape(Shape::kText), text(std::move(is)) {}
  Value(const char* is) : shape(Shape::kText), text(is) {}
  Value(List is) : shape(Shape::kList), list(std::move(is)) {}
  Value(Dict is) : shape(Shape::kDict), dict(std::move(is)) {}
  static Value tuple(List is) {
    Value value(std::move(is));
    value.shape = Shape::kTuple;
    return value;
  }

  Shape shape = Shape::kNone;
  std::int64_t number = 0;
  std::string text;
  List list;
  Dict dict;
};

void write_json(const Value& value, std::string& out) {
  switch (value.shape) {
    case Value::Shape::kNone: out += "null"; return;
    case Value::Shape::kBool: out += value.number != 0 ? "true" : "false"; return;
    case Value::Shape::kNumber: out += std::to_string(value.number); return;
    case Value::Shape::kText: out += quote_json(value.text); return;
    case Value::Shape::kList:
    case Value::Shape::kTuple:
      out += '[';
      for (const Value& one : value.list) {
        if (&one != &value.list.front()) out += ", ";
        write_json(one, out);
      }
      out += ']';
      return;
    case Value::Shape::kDict:
      out += '{';
      for (const auto& one : value.dict) {
        if (&one != &value.dict.front()) out += ", ";
        out += quote_json(one.first) + ": ";
        write_json(one.second, out);
      }
      out += '}';
      return;
  }
}

void append_little_endian(std::string& out, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i));
}

void write_pickled_text(const std::string& text, std::string& out) {
  // Bytes above 0x7f might be no UTF-8, which unpickling would refuse.
  std::string plain = text;
  std::replace_if(plain.begin(), plain.end(), [](char c) { return (c & 0x80) != 0; }, '?');
  out += 'X';
  append_little_endian(out, plain.size(), 4);
  out += plain;
}

// Python's pickle, protocol 2: a program for a small stack machine.
void write_pickle(const Value& value, std::string& out) {
  switch (value.shape) {
    case Value::Shape::kNone: out += 'N'; return;
    case Value::Shape::kBool: out += value.number != 0 ? '\x88' : '\x89'; return;
    case Value::Shape::kNumber:
      out += "\x8a\x08";
      append_little_endian(out, static_cast<std::uint64_t>(value.number), 8);
      return;
    case Value::Shape::kText: write_pickled_text(value.text, out); return;
    case Value::Shape::kTuple:
      out += '(';
      for (const Value& one : value.list) write_pickle(one, out);
      out += 't';
      return;
    case Value::Shape::kList:
      out += "](";
      for (const Value& one : value.list) write_pickle(one, out);
      out += 'e';
      return;
    case Value::Shape::kDict:
      out += "}(";
      for (const auto& one : value.dict) {
        write_pickled_text(one.first, out);
        write_pickle(one.second, out);
      }
      out += 'u';
      return;
  }
}

// --- PyTorch's words ---

std::string torch_type(const std::string& type) {
  static const std::map<std::string, std::string> names = {{"f32", "Float"},
                                                           {"f64", "Double"},
                                                           {"f16", "Half"},
                                                           {"bf16", "BFloat16"},
                                                           {"f8e4m3", "Float8_e4m3fn"},
                                                           {"f8e5m2", "Float8_e5m2"},
                                                           {"i8", "Char"},
                                                           {"i16", "Short"},
                                                           {"i32", "Int"},
                                                           {"i64", "Long"},
                                                           {"u8", "Byte"},
                                                           {"u16", "UInt16"},
                                                           {"u32", "UInt32"},
                                                           {"u64", "UInt64"},
                                                           {"bool", "Bool"},
                                                           {"c64", "ComplexFloat"},
                                                           {"c128", "ComplexDouble"}};
  const auto found = names.find(type);
  return found == names.end() ? type : found->second;
}

std::string torch_operation(const std::string& operation) {
  static const std::map<std::string, std::string> names = {
      {"monitored_barrier", "barrier"},
      {"all_gather", "_all_gather_base"},
      {"reduce_scatter", "_reduce_scatter_base"},
      {"gather_v", "gather"},
      {"scatter_v", "scatter"},
      {"all_to_all_v", "all_to_all"}};
  const auto found = names.find(operation);
  return found == names.end() ? operation : found->second;
}

// It has no word for a failure: what failed has not completed.
const char* torch_state(State state) {
  switch (state) {
    case State::kCompleted: return "completed";
    case State::kScheduled: return "scheduled";
    default: return "started";
  }
}

Value sizes(std::uint64_t elements) { return List{Value(List{Value(elements)})}; }

// Sizes as torchfrtrace compares them: equal on all ranks. Where ranks' parts differ it is the sum,
// or nothing.
std::pair<Value, Value> torch_sizes(const Entry& entry) {
  const std::string& operation = entry.operation;
  if (operation.ends_with("barrier")) return {List{}, List{}};
  if (entry.message) {
    return operation == "send" ? std::pair<Value, Value>(sizes(entry.input), List{})
                               : std::pair<Value, Value>(List{}, sizes(entry.output));
  }
  if (operation == "all_gather_v") return {sizes(entry.output), sizes(entry.output)};
  if (operation == "reduce_scatter_v") return {sizes(entry.input), sizes(entry.input)};
  if (operation == "gather_v") return {List{}, sizes(entry.output)};
  if (operation == "scatter_v") return {sizes(entry.input), List{}};
  return {sizes(entry.input), sizes(entry.output)};
}

// --- the job ---

int rank_of(const Log& log, const std::vector<Log>& job) {
  return log.rank.value_or(static_cast<int>(&log - job.data()));
}

// The members of a group by their ranks in the job; by their ranks in the group if processes do not
// tell (ranks that are threads, a rank of which there is no record).
std::vector<int> members(const GroupEntry& group, const std::vector<Log>& job) {
  std::map<pid_t, int> ranks;
  for (const Log& log : job) ranks.emplace(log.pid, rank_of(log, job));
  std::vector<int> result;
  for (const pid_t pid : group.processes) {
    const auto found = ranks.find(pid);
    if (found == ranks.end()) break;
    result.push_back(found->second);
  }
  const bool whole = static_cast<int>(result.size()) == group.size &&
                     std::set<int>(result.begin(), result.end()).size() == result.size();
  if (whole) return result;
  result.clear();
  for (int r = 0; r < group.size; ++r) result.push_back(r);
  return result;
}

// Names of groups that are different in one log; a second "world" becomes "world#2".
std::map<std::uint64_t, std::string> group_names(const Log& log) {
  std::map<std::uint64_t, std::string> names;
  std::map<std::string, int> times;
  for (const Entry& entry : log.entries) {
    if (names.contains(entry.group)) continue;
    const GroupEntry* group = log.group_of(entry);
    const std::string name = group ? group->name : "unknown";
    const int time = ++times[name];
    names[entry.group] = time == 1 ? name : concat(name, "#", time);
  }
  return names;
}

// The first collective of each group that all records still have.
using Firsts = std::map<std::string, std::uint64_t>;
Firsts common_firsts(const std::vector<Log>& job) {
  Firsts firsts;
  for (const Log& log : job) {
    const auto names = group_names(log);
    std::set<std::string> seen;
    for (const Entry& entry : log.entries) {
      const std::string& name = names.at(entry.group);
      if (entry.message || !seen.insert(name).second) continue;
      auto& first = firsts[name];
      first = std::max(first, entry.number);
    }
  }
  return firsts;
}

Value torch_entry(const Log& log, const Entry& entry, const std::string& group,
                  std::uint64_t record) {
  const auto wall = [&](nanoseconds time) {
    return time == nanoseconds::zero() ? Value() : Value((log.wall + (time - log.steady)).count());
  };
  const GroupEntry* member = log.group_of(entry);
  const int rank = member ? member->rank : 0;
  // "gloo:": the one backend for host memory among those whose names torchfrtrace accepts.
  std::string title = "gloo:" + torch_operation(entry.operation);
  if (entry.message)
    title += concat(" ", rank, entry.operation == "send" ? "->" : "<-", entry.peer);
  auto [input, output] = torch_sizes(entry);
  List frames;
  if (entry.line != 0) {
    frames.push_back(Dict{{"name", entry.function},
                          {"filename", entry.file},
                          {"line", static_cast<int>(entry.line)}});
  }
  const List types = {Value(torch_type(entry.type))};
  return Dict{{"frames", std::move(frames)},
              {"record_id", record},
              {"pg_id", entry.group},
              {"process_group", Value::tuple({group, "undefined"})},
              {"collective_seq_id", entry.message ? std::uint64_t{0} : entry.number},
              {"p2p_seq_id", entry.message ? entry.number : std::uint64_t{0}},
              {"op_id", record},
              {"profiling_name", title},
              {"time_created_ns", wall(entry.created)},
              {"input_sizes", std::move(input)},
              {"input_dtypes", types},
              {"output_sizes", std::move(output)},
              {"output_dtypes", types},
              {"state", torch_state(entry.state)},
              {"time_discovered_started_ns", wall(entry.started)},
              {"time_discovered_completed_ns",
               entry.state == State::kCompleted ? wall(entry.ended) : Value()},
              {"retired", entry.over()},
              {"timeout_ms", 0},
              {"is_p2p", entry.message},
              {"failed", entry.state == State::kFailed}};
}

// Ours: PyTorch's has no calls.
Value call_entry(const Log& log, const Entry& entry) {
  const auto wall = [&](nanoseconds time) {
    return time == nanoseconds::zero() ? Value() : Value((log.wall + (time - log.steady)).count());
  };
  const GroupEntry* const session = log.group_of(entry);
  static constexpr std::array kMade = {"", "queued", "sent", "answered", "failed"};
  static constexpr std::array kRun = {"", "queued", "running", "answered", "failed"};
  static constexpr std::array kPassed = {"", "waiting", "running", "done", "failed"};
  const auto& states = entry.pass ? kPassed : entry.served ? kRun : kMade;
  return Dict{{"worker", session ? session->name : ""},
              {entry.served ? "caller" : "callee", peer_of(log, entry)},
              {"function", entry.operation},
              {"number", entry.number},
              {"state", states[static_cast<std::size_t>(entry.state)]},
              {"time_created_ns", wall(entry.created)},
              {"time_started_ns", wall(entry.started)},
              {"time_ended_ns", wall(entry.ended)}};
}

enum class Which { kAll, kCommonCollectives };

Value torch_form(const Log& log, const std::vector<Log>& job, Which which) {
  const auto names = group_names(log);
  const Firsts firsts = common_firsts(job);
  Dict config;
  for (const auto& [id, name] : names) {
    const auto found = log.groups.find(id);
    if (found == log.groups.end()) continue;
    std::string ranks;
    for (const int rank : members(found->second, job)) {
      ranks += concat(ranks.empty() ? "" : ", ", rank);
    }
    config.emplace_back(
        name, Dict{{"name", name}, {"desc", "undefined"}, {"ranks", concat("[", ranks, "]")}});
  }
  List entries;
  std::uint64_t record = 0;
  for (const Entry& entry : log.entries) {
    const std::string& name = names.at(entry.group);
    if (which == Which::kCommonCollectives) {
      if (entry.message || !log.group_of(entry)) continue;
      if (entry.number < firsts.at(name)) continue;
      entries.push_back(torch_entry(log, entry, name, record++));
    } else {
      entries.push_back(torch_entry(log, entry, name, entry.ticket - 1));
    }
  }
  Dict form = {{"version", "2.10"},
               {"rank", rank_of(log, job)},
               {"pid", static_cast<int>(log.pid)},
               {"pg_config", std::move(config)},
               {"entries", std::move(entries)}};
  if (which == Which::kAll && !log.calls.empty()) {
    List calls;
    for (const Entry& entry : log.calls) calls.push_back(call_entry(log, entry));
    form.emplace_back("rpc_calls", std::move(calls));
  }
  return form;
}

// --- for people ---

struct Waiting {
  bool arrived_is_there;     // a rank that is in an operation has come to it
  nanoseconds failed_since;  // operations of others that failed earlier do not count
};

std::vector<std::string> waiting_for(const Log& log, const std::vector<Log>& job,
                                     const Waiting& which) {
  // What the rank is through with, well or not, by the name of the group.
  std::map<std::string, std::uint64_t> through;
  for (const Entry& entry : log.entries) {
    const GroupEntry* group = log.group_of(entry);
    if (!group || entry.message) continue;
    if (!entry.over() && !(which.arrived_is_there && entry.under_way())) continue;
    through[group->name] = std::max(through[group->name], entry.number);
  }
  std::map<std::string, std::vector<int>> waiting;
  for (const Log& other : job) {
    if (other.pid == log.pid) continue;
    const Entry* first = nullptr;  // of one group, the one that it came to
    for (const Entry& entry : other.entries) {
      const GroupEntry* group = other.group_of(entry);
      if (!group || entry.message || entry.state == State::kCompleted) continue;
      if (entry.state == State::kFailed && entry.ended < which.failed_since) continue;
      const auto& pids = group->processes;
      if (std::find(pids.begin(), pids.end(), log.pid) == pids.end()) continue;
      const auto known = through.find(group->name);
      if (known != through.end() && entry.number <= known->second) continue;
      if (!first || entry.ticket < first->ticket) first = &entry;
    }
    if (!first) continue;
    const std::string place = describe_place(*first);
    const std::string text =
        concat(describe(other, *first), place.empty() ? "" : concat(" (", place, ")"));
    waiting[text].push_back(rank_of(other, job));
  }
  std::vector<std::string> lines;
  for (const auto& [text, ranks] : waiting) {
    std::string who = ranks.size() == 1 ? "rank " : "ranks ";
    for (std::size_t i = 0; i < ranks.size(); ++i) who += concat(i == 0 ? "" : ", ", ranks[i]);
    lines.push_back(concat(who, " in ", text));
  }
  return lines;
}

}  // namespace

std::string to_json(const Log& log, const std::vector<Log>& job) {
  std::string out;
  write_json(torch_form(log, job, Which::kAll), out);
  return out + "\n";
}

std::string to_pickle(const Log& log, const std::vector<Log>& job) {
  std::string out = "\x80\x02";
  write_pickle(torch_form(log, job, Which::kCommonCollectives), out);
  return out + '.';
}

void write_dumps(const std::string& folder, const std::vector<Log>& job) {
  std::filesystem::create_directories(folder);
  for (const Log& log : job) {
    const int rank = rank_of(log, job);
    write_file(concat(folder, "/rank_", rank), to_pickle(log, job), 0644);
    write_file(concat(folder, "/", rank, ".json"), to_json(log, job), 0644);
  }
}

std::string short_time(nanoseconds time) {
  if (time < std::chrono::milliseconds(1)) return concat(time.count() / 1000, " us");
  if (time < std::chrono::seconds(1)) {
    return concat(std::round(static_cast<double>(time.count()) / 1e5) / 10, " ms");
  }
  return format_duration(time);
}

std::string describe_line(const Log& log, const Entry& entry, nanoseconds now) {
  std::string text = describe(log, entry);
  if (!entry.operation.ends_with("barrier")) {
    text += concat(", ", std::max(entry.input, entry.output), " x ", entry.type);
  }
  const auto since = [&](nanoseconds when) {
    return short_time(std::max(nanoseconds(), now - when));
  };
  switch (entry.state) {
    case State::kNone: break;
    case State::kScheduled:
      text += concat(", waiting for its turn for ", since(entry.created));
      break;
    case State::kStarted: text += concat(", under way for ", since(entry.started)); break;
    case State::kCompleted:
    case State::kFailed:
      text += concat(entry.state == State::kFailed ? ", failed after " : ", completed in ",
                     short_time(std::max(nanoseconds(), entry.ended - entry.created)), ", ",
                     since(entry.ended), " ago");
  }
  const std::string place = describe_place(entry);
  return place.empty() ? text : concat(text, ", ", place);
}

std::vector<std::string> last_operations(const Log& log, std::size_t most, nanoseconds now,
                                         nanoseconds since) {
  std::vector<std::string> lines;
  for (std::size_t i = log.entries.size(); i-- > 0 && lines.size() < most;) {
    const Entry& entry = log.entries[i];
    if (entry.state == State::kFailed && entry.ended < since) continue;
    lines.push_back(describe_line(log, entry, now));
  }
  std::reverse(lines.begin(), lines.end());
  return lines;
}

std::vector<std::string> who_waits_for(const Log& log, const std::vector<Log>& job) {
  return waiting_for(log, job, {.arrived_is_there = true, .failed_since = nanoseconds::max()});
}

std::vector<std::string> who_waited_for(const Log& log, const std::vector<Log>& job,
                                        nanoseconds since) {
  return waiting_for(log, job, {.arrived_is_there = false, .failed_since = since});
}

}  // namespace convoy::flight
