#include "store/table.h"

#include <algorithm>
#include <charconv>
#include <utility>

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
  fail(ErrorKind::kInvalidArgument, "store: unknown ", to_string(op),
       "; the server may be of an older version than its client");
}

bool waits(StoreOp op) {
  return op == StoreOp::kGet || op == StoreOp::kWait || op == StoreOp::kWatch;
}

StoreOp op_of(const StoreMessage& request) { return static_cast<StoreOp>(request.code); }

StoreReply number_reply(std::int64_t number) { return {.message = {.number = number}}; }

std::int64_t parse_number(const std::string& key, const std::string& text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    fail(ErrorKind::kInvalidArgument, "store: add to key ", printable(key), ": value ",
         printable(text), " is not a number");
  }
  return value;
}

}  // namespace

StoreMessage StoreReply::to_message() && {
  if (value) message.parts.push_back(value->bytes());
  return std::move(message);
}

std::size_t StoreTable::waiting_cost(const StoreMessage& request) {
  std::size_t bytes = 512;
  for (const auto& part : request.parts) bytes += part.size() + 64;
  return bytes;
}

void StoreTable::check_shape(const StoreMessage& request) const {
  const StoreOp op = op_of(request);
  const Shape shape = shape_of(op);
  const std::size_t count = request.parts.size();
  if (request.oversized) {
    fail(ErrorKind::kResource, "store: ", to_string(op),
         ": the request is too large; at most: a key of ", limits_.key_bytes, " bytes, a value of ",
         limits_.value_bytes, ", ", limits_.keys_per_request, " keys in one request");
  }
  if (count < shape.least_parts || count > shape.most_parts) {
    fail(ErrorKind::kInvalidArgument, "store: ", to_string(op), " with ", count, " parts");
  }
  if (shape.keys == kAny && count > limits_.keys_per_request) {
    fail(ErrorKind::kResource, "store: ", to_string(op), ": ", count,
         " keys in one request; at most ", limits_.keys_per_request);
  }
  for (std::size_t i = 0; i < count; ++i) {
    const bool is_key = i < shape.keys;
    const std::size_t limit = is_key ? limits_.key_bytes : limits_.value_bytes;
    if (request.parts[i].size() > limit) {
      fail(ErrorKind::kResource, "store: ", to_string(op), is_key ? ": a key of " : ": a value of ",
           request.parts[i].size(), " bytes; at most ", limit);
    }
  }
}

void StoreTable::handle(ClientId client, StoreMessage request, Clock::time_point now) {
  const std::uint32_t id = request.id;
  std::optional<StoreReply> reply;
  try {
    check_shape(request);
    std::size_t at = 0;
    reply = waits(op_of(request)) ? try_finish(request, at) : answer(request);
    if (!reply) return enqueue(client, std::move(request), at, now);
    reply->message.id = id;
  } catch (const Error& error) {
    reply = StoreReply{.message = error_reply(id, error.kind(), error.what())};
  }
  reply_(client, std::move(*reply));
}

StoreReply StoreTable::answer(StoreMessage& request) {
  const auto& parts = request.parts;
  switch (op_of(request)) {
    case StoreOp::kSet: return set(request);
    case StoreOp::kAppend: return append(request);
    case StoreOp::kTryGet: {
      const auto found = entries_.find(parts[0]);
      if (found == entries_.end()) return {};
      return {.message = {}, .value = found->second.value};
    }
    case StoreOp::kCheck: return number_reply(exist(parts));
    case StoreOp::kAdd: return add(request);
    case StoreOp::kCompareSet: return compare_set(request);
    case StoreOp::kErase: return number_reply(erase(parts[0]));
    case StoreOp::kKeys: return list_keys(parts[0]);
    case StoreOp::kGet:
    case StoreOp::kWait:
    case StoreOp::kWatch: break;
  }
  fail(ErrorKind::kInternal, "store: ", to_string(op_of(request)), " is answered elsewhere");
}

StoreReply StoreTable::set(StoreMessage& request) {
  write(request.parts[0], std::move(request.parts[1]));
  return {};
}

StoreReply StoreTable::append(const StoreMessage& request) {
  const auto& key = request.parts[0];
  const auto& more = request.parts[1];
  const auto found = entries_.find(key);
  if (found == entries_.end()) {
    write(key, more);
    return {};
  }
  const std::size_t old_bytes = found->second.value->bytes().size();
  if (found->second.value.use_count() > 1) {  // a reply that is still to be sent holds it
    write(key, found->second.value->bytes() + more);
    return {};
  }
  check_room(key, false, old_bytes + more.size(), old_bytes);
  found->second.value->append(more);  // in place: n appends cost n steps
  found->second.version = ++last_version_;
  changed(key);
  return {};
}

StoreReply StoreTable::add(const StoreMessage& request) {
  const auto& key = request.parts[0];
  const auto found = entries_.find(key);
  const std::int64_t old =
      found == entries_.end() ? 0 : parse_number(key, found->second.value->bytes());
  std::int64_t sum = 0;
  if (__builtin_add_overflow(old, request.number, &sum)) {
    fail(ErrorKind::kInvalidArgument, "store: add to key ", printable(key), ": ", old, " + ",
         request.number, " overflows");
  }
  write(key, std::to_string(sum));
  return number_reply(sum);
}

StoreReply StoreTable::compare_set(StoreMessage& request) {
  const auto& key = request.parts[0];
  const auto& expected = request.parts[1];
  const auto found = entries_.find(key);
  const bool exists = found != entries_.end();
  const bool matches = exists ? found->second.value->bytes() == expected : expected.empty();
  if (matches) return {.message = {}, .value = write(key, std::move(request.parts[2])).value};
  if (exists) return {.message = {}, .value = found->second.value};
  return {.message = {.parts = {expected}}};
}

StoreReply StoreTable::list_keys(const std::string& prefix) const {
  StoreReply reply;
  for (auto i = entries_.lower_bound(prefix); i != entries_.end() && i->first.starts_with(prefix);
       ++i) {
    reply.message.parts.push_back(i->first);
  }
  return reply;
}

bool StoreTable::exist(const std::vector<std::string>& keys) const {
  return std::all_of(keys.begin(), keys.end(),
                     [&](const auto& key) { return entries_.contains(key); });
}

void StoreTable::check_room(const std::string& key, bool is_new, std::size_t value_bytes,
                            std::size_t freed) const {
  if (value_bytes > limits_.value_bytes) {
    fail(ErrorKind::kResource, "store: the value of key ", printable(key), " would grow to ",
         value_bytes, " bytes; at most ", limits_.value_bytes);
  }
  const std::size_t added = value_bytes + (is_new ? key.size() : 0);
  if (bytes() - freed + added > limits_.total_bytes ||
      (is_new && entries_.size() >= limits_.keys)) {
    fail(ErrorKind::kResource, "store: full (", entries_.size(), " of ", limits_.keys, " keys, ",
         bytes(), " of ", limits_.total_bytes, " bytes); key ", printable(key), " was not changed");
  }
}

const StoreTable::Entry& StoreTable::write(const std::string& key, std::string value) {
  auto found = entries_.find(key);
  if (found == entries_.end()) {
    check_room(key, true, value.size(), 0);
    found = entries_.try_emplace(key).first;
    key_bytes_ += key.size();
  } else {
    // Overwriting frees the old bytes only if no reply holds them.
    const bool frees = found->second.value.use_count() == 1;
    check_room(key, false, value.size(), frees ? found->second.value->bytes().size() : 0);
  }
  found->second = {std::make_shared<StoreValue>(std::move(value), live_), ++last_version_};
  changed(key);
  return found->second;
}

bool StoreTable::erase(const std::string& key) {
  const auto found = entries_.find(key);
  if (found == entries_.end()) return false;
  key_bytes_ -= key.size();
  entries_.erase(found);
  changed(key);
  return true;
}

std::optional<StoreReply> StoreTable::try_finish(const StoreMessage& request,
                                                 std::size_t& at) const {
  const auto& keys = request.parts;
  if (op_of(request) == StoreOp::kWait) {
    // Once around, from the key that was missing: those before it may have been erased since.
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const std::size_t next = (at + i) % keys.size();
      if (entries_.contains(keys[next])) continue;
      at = next;
      return std::nullopt;
    }
    return StoreReply{};
  }
  const auto found = entries_.find(keys[0]);
  const bool exists = found != entries_.end();
  if (op_of(request) == StoreOp::kGet) {
    if (!exists) return std::nullopt;
    return StoreReply{.message = {}, .value = found->second.value};
  }
  const auto version = static_cast<std::int64_t>(exists ? found->second.version : 0);
  if (version == request.number) return std::nullopt;
  StoreReply reply = number_reply(version);
  if (exists) reply.value = found->second.value;
  return reply;
}

void StoreTable::enqueue(ClientId client, StoreMessage request, std::size_t at,
                         Clock::time_point now) {
  if (request.timeout_us == 0) fail(ErrorKind::kTimeout, missing_text(request));
  const auto mine = by_client_.find(client);
  if (mine != by_client_.end() && mine->second.size() >= limits_.waiting_per_client) {
    fail(ErrorKind::kResource, "store: this client waits for ", mine->second.size(),
         " requests already; at most ", limits_.waiting_per_client);
  }
  const std::size_t cost = waiting_cost(request);
  if (waiting_bytes_ + cost > limits_.total_bytes) {
    fail(ErrorKind::kResource, "store: waiting requests hold ", waiting_bytes_,
         " bytes already; at most ", limits_.total_bytes);
  }
  waiting_bytes_ += cost;
  const auto left = Clock::time_point::max() - now;
  const auto most = std::chrono::duration_cast<std::chrono::microseconds>(left).count();
  const bool endless = request.timeout_us >= static_cast<std::uint64_t>(most);
  const auto deadline =
      endless ? Clock::time_point::max() : now + std::chrono::microseconds(request.timeout_us);
  const WaiterId id = next_waiter_++;
  by_key_[request.parts[at]].insert(id);
  by_client_[client].insert(id);
  by_deadline_.emplace(deadline, id);
  waiters_.emplace(id, Waiter{client, std::move(request), deadline, at});
}

void StoreTable::unpark(const std::string& key, WaiterId id) {
  const auto found = by_key_.find(key);
  found->second.erase(id);
  if (found->second.empty()) by_key_.erase(found);
}

StoreTable::Waiter StoreTable::remove(WaiterId id) {
  auto node = waiters_.extract(id);
  Waiter waiter = std::move(node.mapped());
  unpark(waiter.request.parts[waiter.at], id);
  const auto client = by_client_.find(waiter.client);
  client->second.erase(id);
  if (client->second.empty()) by_client_.erase(client);
  by_deadline_.erase({waiter.deadline, id});
  waiting_bytes_ -= waiting_cost(waiter.request);
  return waiter;
}

void StoreTable::changed(const std::string& key) {
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return;
  const std::vector<WaiterId> candidates(found->second.begin(), found->second.end());
  for (const WaiterId id : candidates) {
    Waiter& waiter = waiters_.at(id);
    std::size_t at = waiter.at;
    if (auto reply = try_finish(waiter.request, at)) {
      reply->message.id = waiter.request.id;
      reply_(remove(id).client, std::move(*reply));
    } else if (at != waiter.at) {
      unpark(key, id);
      waiter.at = at;
      by_key_[waiter.request.parts[at]].insert(id);
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
    reply_(waiter.client, {.message = error_reply(waiter.request.id, ErrorKind::kTimeout,
                                                  missing_text(waiter.request))});
  }
}

std::optional<StoreTable::Clock::time_point> StoreTable::next_expiry() const {
  if (by_deadline_.empty()) return std::nullopt;
  return by_deadline_.begin()->first;
}

std::string StoreTable::missing_text(const StoreMessage& request) const {
  constexpr std::size_t kShown = 8;
  const std::uint64_t milliseconds = (request.timeout_us + 500) / 1000;  // rounded
  std::string text =
      concat("store: timed out after ", static_cast<double>(milliseconds) / 1000, " s: ");
  if (op_of(request) == StoreOp::kWatch) {
    return text + concat("no change of key ", printable(request.parts[0]));
  }
  std::size_t missing = 0;
  for (const auto& key : request.parts) {
    if (entries_.contains(key)) continue;
    if (++missing <= kShown) text += concat(missing == 1 ? "no key " : ", ", printable(key));
  }
  if (missing > kShown) text += concat(" and ", missing - kShown, " more");
  return text + concat(" (", request.parts.size() - missing, " of ", request.parts.size(),
                       " keys are there)");
}

}  // namespace convoy
