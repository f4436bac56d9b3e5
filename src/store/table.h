#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "convoy/deadline.h"
#include "convoy/error.h"
#include "store/protocol.h"
#include "store/server.h"

namespace convoy {

// The store itself, without sockets, threads or clocks: requests go in with the present time,
// replies come out, at once or later. The server and the in-process store both run on it. Not
// thread-safe: its owner serialises.
class StoreTable {
 public:
  using Clock = Deadline::Clock;
  using ClientId = std::uint64_t;
  using ReplyFunction = std::function<void(ClientId, StoreMessage)>;

  // `reply` is called from within handle() and expire(), once for every request.
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
  std::size_t bytes() const { return bytes_; }
  std::size_t waiting() const { return waiters_.size(); }

 private:
  using WaiterId = std::uint64_t;
  struct Entry {
    std::string value;
    std::uint64_t version = 0;
  };
  struct Waiter {
    ClientId client;
    StoreMessage request;
    Clock::time_point deadline;
  };

  StoreMessage answer(const StoreMessage& request);  // throws Error
  void write(const std::string& key, std::string value);
  bool erase(const std::string& key);
  void changed(const std::string& key);
  // The reply if the request need not wait (any longer).
  std::optional<StoreMessage> try_finish(const StoreMessage& request) const;
  void enqueue(ClientId client, StoreMessage request, Clock::time_point now);
  Waiter remove(WaiterId id);
  std::string missing_text(const StoreMessage& request) const;
  void check_shape(const StoreMessage& request) const;

  const StoreLimits limits_;
  const ReplyFunction reply_;
  std::map<std::string, Entry> entries_;
  std::size_t bytes_ = 0;          // of keys and values
  std::size_t waiting_bytes_ = 0;  // of the keys in waiting requests
  std::uint64_t last_version_ = 0;
  WaiterId next_waiter_ = 1;
  std::unordered_map<WaiterId, Waiter> waiters_;
  std::unordered_map<std::string, std::set<WaiterId>> by_key_;
  std::unordered_map<ClientId, std::set<WaiterId>> by_client_;
  std::set<std::pair<Clock::time_point, WaiterId>> by_deadline_;
};

// The reply that makes the client throw Error(kind, message).
StoreMessage error_reply(std::uint32_t id, ErrorKind kind, const std::string& message);
// Throws what an error reply carries; returns any other.
StoreMessage checked_reply(StoreMessage reply);

}  // namespace convoy
