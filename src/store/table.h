#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>

#include "convoy/deadline.h"
#include "store/protocol.h"
#include "store/server.h"

namespace convoy {

// The bytes of a value: in memory once, however many replies carry them. Counts itself in `live`
// for as long as anybody holds it, so a value that was overwritten while a slow client still has to
// fetch it is not forgotten. Not thread-safe: all holders live where the table lives.
class StoreValue {
 public:
  StoreValue(std::string bytes, std::shared_ptr<std::size_t> live)
      : bytes_(std::move(bytes)), live_(std::move(live)) {
    *live_ += bytes_.size();
  }
  StoreValue(const StoreValue&) = delete;
  StoreValue& operator=(const StoreValue&) = delete;
  ~StoreValue() { *live_ -= bytes_.size(); }

  const std::string& bytes() const { return bytes_; }
  void append(std::string_view more) {
    bytes_.append(more);
    *live_ += more.size();
  }

 private:
  std::string bytes_;
  std::shared_ptr<std::size_t> live_;
};

// A reply as the table gives it: `value`, if there is one, is the last part.
struct StoreReply {
  StoreMessage message;
  std::shared_ptr<const StoreValue> value = nullptr;

  // With a copy of the value.
  StoreMessage to_message() &&;
};

// The store itself, without sockets, threads or clocks: requests go in with the present time,
// replies come out, at once or later. The server and the in-process store both run on it. Not
// thread-safe: its owner serialises.
class StoreTable {
 public:
  using Clock = Deadline::Clock;
  using ClientId = std::uint64_t;
  using ReplyFunction = std::function<void(ClientId, StoreReply)>;

  // `reply` is called from within handle() and expire(), once for every request, unless its client
  // was dropped. It must not throw and must not call the table.
  StoreTable(const StoreLimits& limits, ReplyFunction reply)
      : limits_(limits), reply_(std::move(reply)) {}

  void handle(ClientId client, StoreMessage request, Clock::time_point now);
  // Forgets what the client waits for.
  void drop(ClientId client);
  // Answers every request whose time has come with kTimeout.
  void expire(Clock::time_point now);
  // When expire() has something to do next; nullopt: nobody waits.
  std::optional<Clock::time_point> next_expiry() const;

  std::size_t keys() const { return entries_.size(); }
  // Of keys and values, those included that only replies still hold.
  std::size_t bytes() const { return key_bytes_ + *live_; }
  std::size_t waiting() const { return waiters_.size(); }
  std::size_t waiting_bytes() const { return waiting_bytes_; }
  // What a waiting request takes, about, with the nodes that hold it: empty keys are not free.
  static std::size_t waiting_cost(const StoreMessage& request);

 private:
  using WaiterId = std::uint64_t;
  struct Entry {
    std::shared_ptr<StoreValue> value;
    std::uint64_t version = 0;
  };
  // Every waiter sits in by_key_ under one key only, the one whose change it needs next. A `wait`
  // for many keys sits under one that is missing and moves on when that one appears, so n keys cost
  // n steps in all and not n at each change.
  struct Waiter {
    ClientId client;
    StoreMessage request;
    Clock::time_point deadline;
    std::size_t at = 0;  // index of that key in request.parts
  };

  void check_shape(const StoreMessage& request) const;  // throws Error
  StoreReply answer(StoreMessage& request);             // throws Error, and then changes nothing
  StoreReply set(StoreMessage& request);
  StoreReply append(const StoreMessage& request);
  StoreReply add(const StoreMessage& request);
  StoreReply compare_set(StoreMessage& request);
  StoreReply list_keys(const std::string& prefix) const;
  bool exist(const std::vector<std::string>& keys) const;

  // Throws if a value of so many bytes does not fit once `freed` bytes are free.
  void check_room(const std::string& key, bool is_new, std::size_t value_bytes,
                  std::size_t freed) const;
  const Entry& write(const std::string& key, std::string value);
  bool erase(const std::string& key);
  void changed(const std::string& key);
  // The reply if the request need not wait (any longer). Moves `at` to the key to wait for.
  std::optional<StoreReply> try_finish(const StoreMessage& request, std::size_t& at) const;
  void enqueue(ClientId client, StoreMessage request, std::size_t at, Clock::time_point now);
  void unpark(const std::string& key, WaiterId id);
  Waiter remove(WaiterId id);
  std::string missing_text(const StoreMessage& request) const;

  const StoreLimits limits_;
  const ReplyFunction reply_;
  const std::shared_ptr<std::size_t> live_ = std::make_shared<std::size_t>(0);
  std::map<std::string, Entry> entries_;
  std::size_t key_bytes_ = 0;
  std::size_t waiting_bytes_ = 0;
  std::uint64_t last_version_ = 0;
  WaiterId next_waiter_ = 1;
  std::unordered_map<WaiterId, Waiter> waiters_;
  std::unordered_map<std::string, std::set<WaiterId>> by_key_;
  std::unordered_map<ClientId, std::set<WaiterId>> by_client_;
  std::set<std::pair<Clock::time_point, WaiterId>> by_deadline_;
};

}  // namespace convoy
