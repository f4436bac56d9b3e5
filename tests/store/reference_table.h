#pragma once

#include <algorithm>
#include <charconv>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "store/protocol.h"
#include "store/server.h"
#include "store/table.h"

namespace convoy::test {

// What a StoreTable must do, written to be obviously right and not to be quick: after every change
// it looks at every waiting request. Time is a number of microseconds. Used by the model test and
// by the fuzzer; see check_same().
class ReferenceTable {
 public:
  struct Reply {
    std::uint64_t client;
    StoreMessage message;  // of an error reply: without its text
    friend bool operator==(const Reply&, const Reply&) = default;
  };

  explicit ReferenceTable(const StoreLimits& limits) : limits_(limits) {}

  std::vector<Reply> handle(std::uint64_t client, const StoreMessage& request, std::int64_t now) {
    replies_.clear();
    const int refusal = refuse(request);
    if (refusal >= 0) {
      reply_error(client, request.id, static_cast<ErrorKind>(refusal));
    } else if (!answer({client, request, 0})) {
      wait(client, request, now);
    }
    return std::move(replies_);
  }

  std::vector<Reply> expire(std::int64_t now) {
    replies_.clear();
    std::stable_sort(waiting_.begin(), waiting_.end(),
                     [](const auto& a, const auto& b) { return a.until < b.until; });
    for (const auto& each : waiting_) {
      if (each.until <= now) reply_error(each.client, each.request.id, ErrorKind::kTimeout);
    }
    std::erase_if(waiting_, [&](const auto& each) { return each.until <= now; });
    return std::move(replies_);
  }

  void drop(std::uint64_t client) {
    std::erase_if(waiting_, [&](const auto& each) { return each.client == client; });
  }

  std::size_t keys() const { return entries_.size(); }
  std::size_t bytes() const {
    std::size_t sum = 0;
    for (const auto& [key, entry] : entries_) sum += key.size() + entry.value.size();
    return sum;
  }
  std::size_t waiting() const { return waiting_.size(); }
  std::size_t waiting_bytes() const {
    std::size_t sum = 0;
    for (const auto& each : waiting_) sum += StoreTable::waiting_cost(each.request);
    return sum;
  }
  std::int64_t next_expiry() const {  // INT64_MAX: none
    std::int64_t next = INT64_MAX;
    for (const auto& each : waiting_) next = std::min(next, each.until);
    return next;
  }

 private:
  struct Entry {
    std::string value;
    std::int64_t version;
  };
  struct Waiting {
    std::uint64_t client;
    StoreMessage request;
    std::int64_t until;
  };

  // The kind of the error that the request's form deserves, or -1.
  int refuse(const StoreMessage& request) const {
    const int invalid = static_cast<int>(ErrorKind::kInvalidArgument);
    const int resource = static_cast<int>(ErrorKind::kResource);
    const auto op = static_cast<StoreOp>(request.code);
    if (op < StoreOp::kSet || op > kLastStoreOp) return invalid;
    if (request.oversized) return resource;
    const bool list = op == StoreOp::kWait || op == StoreOp::kCheck;
    const std::size_t parts = op == StoreOp::kCompareSet                      ? 3
                              : op == StoreOp::kSet || op == StoreOp::kAppend ? 2
                                                                              : 1;
    if (!list && request.parts.size() != parts) return invalid;
    if (list && request.parts.size() > limits_.keys_per_request) return resource;
    for (std::size_t i = 0; i < request.parts.size(); ++i) {
      const std::size_t limit = list || i == 0 ? limits_.key_bytes : limits_.value_bytes;
      if (request.parts[i].size() > limit) return resource;
    }
    return -1;
  }

  bool answer(const Waiting& asked) {  // false: must wait
    const auto& [client, request, until] = asked;
    const auto& parts = request.parts;
    const auto found = parts.empty() ? entries_.end() : entries_.find(parts[0]);
    const bool exists = found != entries_.end();
    const std::string value = exists ? found->second.value : "";
    switch (static_cast<StoreOp>(request.code)) {
      case StoreOp::kSet: write(asked, parts[1], {}); return true;
      case StoreOp::kAppend: write(asked, value + parts[1], {}); return true;
      case StoreOp::kAdd: add(asked, exists, value); return true;
      case StoreOp::kCompareSet:
        if (value == (exists || parts[1].empty() ? parts[1] : value + "x")) {
          write(asked, parts[2], {.parts = {parts[2]}});
        } else {
          reply(client, request.id, {.parts = {exists ? value : parts[1]}});
        }
        return true;
      case StoreOp::kErase:
        entries_.erase(parts[0]);
        reply(client, request.id, {.number = exists});
        look_at_waiting();
        return true;
      case StoreOp::kTryGet:
        reply(client, request.id, exists ? StoreMessage{.parts = {value}} : StoreMessage{});
        return true;
      case StoreOp::kCheck: reply(client, request.id, {.number = have_all(parts)}); return true;
      case StoreOp::kKeys: {
        StoreMessage list;
        for (const auto& [key, entry] : entries_) {
          if (key.substr(0, parts[0].size()) == parts[0]) list.parts.push_back(key);
        }
        reply(client, request.id, list);
        return true;
      }
      case StoreOp::kWait:
        if (have_all(parts)) reply(client, request.id, {});
        return have_all(parts);
      case StoreOp::kGet:
        if (exists) reply(client, request.id, {.parts = {value}});
        return exists;
      case StoreOp::kWatch: {
        const std::int64_t version = exists ? found->second.version : 0;
        if (version == request.number) return false;
        StoreMessage message{.number = version};
        if (exists) message.parts = {value};
        reply(client, request.id, message);
        return true;
      }
    }
    return true;
  }

  bool have_all(const std::vector<std::string>& keys) const {
    return std::all_of(keys.begin(), keys.end(),
                       [&](const auto& key) { return entries_.count(key) != 0; });
  }

  void add(const Waiting& asked, bool exists, const std::string& value) {
    std::int64_t old = 0;
    const char* const end = value.data() + value.size();
    const auto parsed = std::from_chars(value.data(), end, old);
    const __int128 sum = static_cast<__int128>(old) + asked.request.number;
    if ((exists && (parsed.ec != std::errc() || parsed.ptr != end)) || sum > INT64_MAX ||
        sum < INT64_MIN) {
      return reply_error(asked.client, asked.request.id, ErrorKind::kInvalidArgument);
    }
    const auto number = static_cast<std::int64_t>(sum);
    write(asked, std::to_string(number), {.number = number});
  }

  void write(const Waiting& asked, const std::string& value, StoreMessage success) {
    const std::string& key = asked.request.parts[0];
    const auto found = entries_.find(key);
    const bool fresh = found == entries_.end();
    const std::size_t others = bytes() - (fresh ? 0 : key.size() + found->second.value.size());
    if (value.size() > limits_.value_bytes ||
        others + key.size() + value.size() > limits_.total_bytes ||
        (fresh && entries_.size() >= limits_.keys)) {
      return reply_error(asked.client, asked.request.id, ErrorKind::kResource);
    }
    entries_[key] = {value, ++version_};
    reply(asked.client, asked.request.id, std::move(success));
    look_at_waiting();
  }

  void look_at_waiting() {
    std::erase_if(waiting_, [&](const Waiting& each) { return answer(each); });
  }

  void wait(std::uint64_t client, const StoreMessage& request, std::int64_t now) {
    const auto mine = std::count_if(waiting_.begin(), waiting_.end(),
                                    [&](const auto& each) { return each.client == client; });
    if (request.timeout_us == 0) return reply_error(client, request.id, ErrorKind::kTimeout);
    if (static_cast<std::size_t>(mine) >= limits_.waiting_per_client ||
        waiting_bytes() + StoreTable::waiting_cost(request) > limits_.total_bytes) {
      return reply_error(client, request.id, ErrorKind::kResource);
    }
    const bool endless = request.timeout_us > INT32_MAX;
    waiting_.push_back({client, request,
                        endless ? INT64_MAX : now + static_cast<std::int64_t>(request.timeout_us)});
  }

  void reply(std::uint64_t client, std::uint32_t id, StoreMessage message) {
    message.id = id;
    replies_.push_back({client, std::move(message)});
  }
  void reply_error(std::uint64_t client, std::uint32_t id, ErrorKind kind) {
    StoreMessage message = error_reply(id, kind, "");
    message.parts.clear();
    replies_.push_back({client, std::move(message)});
  }

  const StoreLimits limits_;
  std::map<std::string, Entry> entries_;
  std::vector<Waiting> waiting_;  // in the order of arrival, until expire() sorts them
  std::int64_t version_ = 0;
  std::vector<Reply> replies_;
};

// A StoreTable and a ReferenceTable that get the same; every step says what differs, or nothing.
class TablePair {
 public:
  explicit TablePair(const StoreLimits& limits)
      : table_(limits,
               [this](StoreTable::ClientId client, StoreReply reply) {
                 StoreMessage message = std::move(reply).to_message();
                 if (message.code != kReplyOk) {
                   if (message.parts.size() != 1 || message.parts[0].empty()) bad_text_ = true;
                   message.parts.clear();
                 }
                 replies_.push_back({client, std::move(message)});
               }),
        reference_(limits) {}

  std::string handle(std::uint64_t client, const StoreMessage& request) {
    table_.handle(client, request, at(now_));
    return compare(reference_.handle(client, request, now_));
  }
  std::string advance(std::int64_t microseconds) {
    now_ += microseconds;
    table_.expire(at(now_));
    return compare(reference_.expire(now_));
  }
  std::string drop(std::uint64_t client) {
    table_.drop(client);
    reference_.drop(client);
    return compare({});
  }

  const StoreTable& table() const { return table_; }

 private:
  static StoreTable::Clock::time_point at(std::int64_t now) {
    return StoreTable::Clock::time_point(std::chrono::hours(1) + std::chrono::microseconds(now));
  }

  std::string compare(std::vector<ReferenceTable::Reply> expected) {
    const auto order = [](const auto& a, const auto& b) {
      return std::tie(a.client, a.message.id) < std::tie(b.client, b.message.id);
    };
    std::stable_sort(replies_.begin(), replies_.end(), order);
    std::stable_sort(expected.begin(), expected.end(), order);
    const auto got = std::exchange(replies_, {});
    if (bad_text_) return "an error reply without a text";
    if (got != expected) return "other replies";
    if (table_.keys() != reference_.keys()) return "another number of keys";
    if (table_.bytes() != reference_.bytes()) return "another number of bytes";
    if (table_.waiting() != reference_.waiting()) return "another number of waiting requests";
    if (table_.waiting_bytes() != reference_.waiting_bytes()) return "other bytes of waiting";
    const auto next = table_.next_expiry();
    const std::int64_t expected_next = reference_.next_expiry();
    if (next.has_value() != (reference_.waiting() > 0)) return "no next expiry, or one too many";
    if (!next) return "";
    const bool endless = *next == StoreTable::Clock::time_point::max();
    if (endless != (expected_next == INT64_MAX)) return "endless or not";
    return endless || *next == at(expected_next) ? "" : "another next expiry";
  }

  bool bad_text_ = false;
  std::vector<ReferenceTable::Reply> replies_;
  StoreTable table_;
  ReferenceTable reference_;
  std::int64_t now_ = 0;
};

}  // namespace convoy::test
