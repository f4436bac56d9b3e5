#include "store/table.h"

#include <algorithm>
#include <charconv>

#include "base/error.h"

namespace convoy {
namespace {

struct Shape {
  std::size_t least_parts;
  std::size_t most_parts;
  std::size_t keys;  // how many of the parts are keys
};

constexpr std::size_t kAny = SIZE_MAX;

Shape shape_of(StoreOp op) {
  switch (op) {
    case StoreOp::kSet:
    case StoreOp::kAppend: return {2, 2, 1};
    case StoreOp::kCompareSet: return {3, 3, 1};
    case StoreOp::kWait:
    case StoreOp::kCheck: return {0, kAny, kAny};
    case StoreOp::kTryGet:
    case StoreOp::kGet:
    case StoreOp::kAdd:
    case StoreOp::kErase:
    case StoreOp::kKeys:
    case StoreOp::kWatch: return {1, 1, 1};
  }
  fail(ErrorKind::kInvalidArgument, "store: unknown operation ", static_cast<int>(op));
}

bool waits(StoreOp op) {
  return op == StoreOp::kGet || op == StoreOp::kWait || op == StoreOp::kWatch;
}

std::size_t part_bytes(const StoreMessage& message) {
  std::size_t bytes = 0;
  for (const auto& part : message.parts) bytes += part.size();
  return bytes;
}

StoreOp op_of(const StoreMessage& request) { return static_cast<StoreOp>(request.code); }

StoreMessage number_reply(std::uint32_t id, std::int64_t number) {
  return {.code = kReplyOk, .id = id, .number = number};
}

std::int64_t parse_number(const std::string& key, const std::string& text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    fail(ErrorKind::kInvalidArgument, "store: add to key '", key, "', which holds no number");
  }
  return value;
}

}  // namespace

StoreMessage error_reply(std::uint32_t id, ErrorKind kind, const std::string& message) {
  return {
      .code = static_cast<std::uint8_t>(1 + static_cast<int>(kind)), .id = id, .parts = {message}};
}

StoreMessage checked_reply(StoreMessage reply) {
  if (reply.code == kReplyOk) return reply;
  const int kind = reply.code - 1;
  const std::string text = reply.parts.empty() ? "store: error without a text" : reply.parts[0];
  throw Error(kind <= static_cast<int>(ErrorKind::kInternal) ? static_cast<ErrorKind>(kind)
                                                             : ErrorKind::kInternal,
              text);
}

void StoreTable::check_shape(const StoreMessage& request) const {
  if (request.code < 1 || request.code > static_cast<int>(kLastStoreOp)) {
    fail(ErrorKind::kInvalidArgument, "store: unknown operation ", static_cast<int>(request.code));
  }
  const Shape shape = shape_of(op_of(request));
  const std::size_t count = request.parts.size();
  if (count < shape.least_parts || count > shape.most_parts) {
    fail(ErrorKind::kInvalidArgument, "store: operation ", static_cast<int>(request.code), " with ",
         count, " parts");
  }
  if (count > limits_.keys_per_request) {
    fail(ErrorKind::kResource, "store: ", count, " keys in one request; at most ",
         limits_.keys_per_request);
  }
  for (std::size_t i = 0; i < count; ++i) {
    const bool is_key = i < shape.keys;
    const std::size_t limit = is_key ? limits_.key_bytes : limits_.value_bytes;
    if (request.parts[i].size() > limit) {
      fail(ErrorKind::kResource, "store: a ", is_key ? "key" : "value", " of ",
           request.parts[i].size(), " bytes; at most ", limit);
    }
  }
}

void StoreTable::handle(ClientId client, StoreMessage request, Clock::time_point now) {
  const std::uint32_t id = request.id;
  try {
    check_shape(request);
    if (!waits(op_of(request))) {
      StoreMessage reply = answer(request);
      reply.id = id;
      reply_(client, std::move(reply));
    } else if (auto reply = try_finish(request)) {
      reply_(client, std::move(*reply));
    } else {
      enqueue(client, std::move(request), now);
    }
  } catch (const Error& error) {
    reply_(client, error_reply(id, error.kind(), error.what()));
  }
}

StoreMessage StoreTable::answer(const StoreMessage& request) {
  const auto& parts = request.parts;
  const auto found = parts.empty() ? entries_.end() : entries_.find(parts[0]);
  switch (op_of(request)) {
    case StoreOp::kSet: write(parts[0], parts[1]); return {};
    case StoreOp::kAppend:
      write(parts[0], found == entries_.end() ? parts[1] : found->second.value + parts[1]);
      return {};
    case StoreOp::kTryGet:
      if (found == entries_.end()) return {};
      return {.parts = {found->second.value}};
    case StoreOp::kCheck: {
      const bool all = std::all_of(parts.begin(), parts.end(),
                                   [&](const auto& key) { return entries_.contains(key); });
      return number_reply(0, all);
    }
    case StoreOp::kAdd: {
      const std::int64_t old =
          found == entries_.end() ? 0 : parse_number(parts[0], found->second.value);
      std::int64_t sum = 0;
      if (__builtin_add_overflow(old, request.number, &sum)) {
        fail(ErrorKind::kInvalidArgument, "store: add to key '", parts[0], "' overflows");
      }
      write(parts[0], std::to_string(sum));
      return number_reply(0, sum);
    }
    case StoreOp::kCompareSet: {
      const bool exists = found != entries_.end();
      const bool matches = exists ? found->second.value == parts[1] : parts[1].empty();
      if (matches) {
        write(parts[0], parts[2]);
        return {.parts = {parts[2]}};
      }
      return {.parts = {exists ? found->second.value : parts[1]}};
    }
    case StoreOp::kErase: return number_reply(0, erase(parts[0]));
    case StoreOp::kKeys: {
      StoreMessage reply;
      for (auto i = entries_.lower_bound(parts[0]);
           i != entries_.end() && i->first.starts_with(parts[0]); ++i) {
        reply.parts.push_back(i->first);
      }
      return reply;
    }
    case StoreOp::kGet:
    case StoreOp::kWait:
    case StoreOp::kWatch: break;
  }
  fail(ErrorKind::kInternal, "store: operation ", static_cast<int>(request.code), " must wait");
}

void StoreTable::write(const std::string& key, std::string value) {
  const auto found = entries_.find(key);
  const std::size_t old = found == entries_.end() ? 0 : key.size() + found->second.value.size();
  const std::size_t added = key.size() + value.size();
  if (value.size() > limits_.value_bytes) {
    fail(ErrorKind::kResource, "store: the value of key '", key, "' would grow beyond ",
         limits_.value_bytes, " bytes");
  }
  if (bytes_ - old + added > limits_.total_bytes) {
    fail(ErrorKind::kResource, "store: full (", limits_.total_bytes, " bytes); key '", key,
         "' was not set");
  }
  if (found == entries_.end() && entries_.size() >= limits_.keys) {
    fail(ErrorKind::kResource, "store: full (", limits_.keys, " keys); key '", key,
         "' was not set");
  }
  entries_[key] = {std::move(value), ++last_version_};
  bytes_ = bytes_ - old + added;
  changed(key);
}

bool StoreTable::erase(const std::string& key) {
  const auto found = entries_.find(key);
  if (found == entries_.end()) return false;
  bytes_ -= key.size() + found->second.value.size();
  entries_.erase(found);
  changed(key);
  return true;
}

std::optional<StoreMessage> StoreTable::try_finish(const StoreMessage& request) const {
  if (op_of(request) == StoreOp::kWait) {
    const bool all = std::all_of(request.parts.begin(), request.parts.end(),
                                 [&](const auto& key) { return entries_.contains(key); });
    if (!all) return std::nullopt;
    return StoreMessage{.id = request.id};
  }
  const auto found = entries_.find(request.parts[0]);
  const bool exists = found != entries_.end();
  if (op_of(request) == StoreOp::kGet) {
    if (!exists) return std::nullopt;
    return StoreMessage{.id = request.id, .parts = {found->second.value}};
  }
  const auto version = static_cast<std::int64_t>(exists ? found->second.version : 0);
  if (version == request.number) return std::nullopt;
  StoreMessage reply = number_reply(request.id, version);
  if (exists) reply.parts.push_back(found->second.value);
  return reply;
}

void StoreTable::enqueue(ClientId client, StoreMessage request, Clock::time_point now) {
  auto& mine = by_client_[client];
  if (mine.size() >= limits_.waiting_per_client) {
    fail(ErrorKind::kResource, "store: one client waits for ", mine.size(),
         " requests already; at most ", limits_.waiting_per_client);
  }
  const std::size_t bytes = part_bytes(request);
  if (waiting_bytes_ + bytes > limits_.total_bytes) {
    fail(ErrorKind::kResource, "store: waiting requests hold ", waiting_bytes_,
         " bytes already; at most ", limits_.total_bytes);
  }
  waiting_bytes_ += bytes;
  const auto left = Clock::time_point::max() - now;
  const auto most = std::chrono::duration_cast<std::chrono::microseconds>(left).count();
  const bool endless = request.timeout_us >= static_cast<std::uint64_t>(most);
  const auto deadline =
      endless ? Clock::time_point::max() : now + std::chrono::microseconds(request.timeout_us);
  const WaiterId id = next_waiter_++;
  for (const auto& key : request.parts) by_key_[key].insert(id);
  mine.insert(id);
  by_deadline_.emplace(deadline, id);
  waiters_.emplace(id, Waiter{client, std::move(request), deadline});
}

StoreTable::Waiter StoreTable::remove(WaiterId id) {
  auto node = waiters_.extract(id);
  Waiter waiter = std::move(node.mapped());
  for (const auto& key : waiter.request.parts) {
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) continue;  // a key that the request names twice
    found->second.erase(id);
    if (found->second.empty()) by_key_.erase(found);
  }
  const auto client = by_client_.find(waiter.client);
  client->second.erase(id);
  if (client->second.empty()) by_client_.erase(client);
  by_deadline_.erase({waiter.deadline, id});
  waiting_bytes_ -= part_bytes(waiter.request);
  return waiter;
}

void StoreTable::changed(const std::string& key) {
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return;
  const std::vector<WaiterId> candidates(found->second.begin(), found->second.end());
  for (const WaiterId id : candidates) {
    if (auto reply = try_finish(waiters_.at(id).request)) {
      reply_(remove(id).client, std::move(*reply));
    }
  }
}

void StoreTable::drop(ClientId client) {
  const auto found = by_client_.find(client);
  if (found == by_client_.end()) return;
  const std::vector<WaiterId> mine(found->second.begin(), found->second.end());
  for (const WaiterId id : mine) remove(id);
}

void StoreTable::expire(Clock::time_point now) {
  while (!by_deadline_.empty() && by_deadline_.begin()->first <= now) {
    const Waiter waiter = remove(by_deadline_.begin()->second);
    reply_(waiter.client,
           error_reply(waiter.request.id, ErrorKind::kTimeout, missing_text(waiter.request)));
  }
}

std::optional<StoreTable::Clock::time_point> StoreTable::next_expiry() const {
  if (by_deadline_.empty()) return std::nullopt;
  return by_deadline_.begin()->first;
}

std::string StoreTable::missing_text(const StoreMessage& request) const {
  constexpr std::size_t kShown = 8;
  if (op_of(request) == StoreOp::kWatch) {
    return concat("store: timed out waiting for a change of key '", request.parts[0], "'");
  }
  std::string text = "store: timed out waiting for ";
  std::size_t missing = 0;
  for (const auto& key : request.parts) {
    if (entries_.contains(key)) continue;
    if (++missing <= kShown) text += concat(missing == 1 ? "key '" : ", '", key, "'");
  }
  if (missing > kShown) text += concat(" and ", missing - kShown, " more");
  return text + concat(" (", request.parts.size() - missing, " of ", request.parts.size(),
                       " keys are there)");
}

}  // namespace convoy
