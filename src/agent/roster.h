#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <shared_mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "agent/call.h"
#include "agent/peer_table.h"
#include "base/guarded.h"
#include "base/id.h"
#include "transport/endpoint.h"

namespace convoy::agent {

// Who is in a session, by number and by name. One thread at a time writes: it adds the first
// workers, then begin() shows them to all others. From then on a roster is constant, or (kGrows)
// gets more workers. Nobody is taken out: a Peer says itself that it has gone. All others only
// read: by number without a lock, by name under one if the roster grows.
class Roster {
 public:
  using Names = std::map<std::string, WorkerId, std::less<>>;
  enum class Growth { kConstant, kGrows };

  Roster() = default;
  Roster(const Roster&) = delete;
  Roster& operator=(const Roster&) = delete;

  // Its number is the next. It has no name here yet: that comes by begin(), or set_name().
  void add(const std::string& name, const transport::Address& address);
  // Once: the session has these workers, who have all been added.
  void begin(const Id& session, Names names, Growth growth);
  // After begin(), if it grows. From whoever had that name before.
  void set_name(WorkerId worker, const std::string& name);

  // begin() has been called: all that it was told can be read.
  bool has_begun() const noexcept { return begun_.load(std::memory_order_acquire); }
  void check_not_begun() const;
  void check_grows() const;

  // --- after begin() ---

  const Id& session() const noexcept { return session_; }
  bool grows() const noexcept { return grows_; }
  const PeerTable& peers() const noexcept { return peers_; }
  const Worker* find(std::string_view name) const;  // nullptr: there is none

 private:
  Id session_;
  PeerTable peers_;
  mutable std::shared_mutex names_mutex_;  // only if it grows
  Names names_;
  bool grows_ = false;
  std::atomic<bool> begun_{false};
};

// Hellos of workers that are not admitted yet, kept until they are: a worker may greet this one
// before it knows who is in the session, or that another one has joined. Admitted are those with
// numbers below a limit, which only rises; who raises it hears what was kept.
class EarlyHellos {
 public:
  struct Kept {
    transport::Remote* remote;
    std::vector<std::byte> head;
    std::vector<std::byte> table;
  };

  // By the thread that writes the roster, when admission of these has been told to all listeners.
  void admit(std::size_t workers) { admitted_.store(workers, std::memory_order_release); }
  bool is_admitted(WorkerId worker) const {
    return worker < admitted_.load(std::memory_order_acquire);
  }
  bool is_anybody_admitted() const { return admitted_.load(std::memory_order_acquire) != 0; }

  // False: there are too many. It is dropped, and said again.
  bool keep(transport::Remote& remote, std::span<const std::byte> head,
            std::span<const std::byte> table);
  std::vector<Kept> take();
  void drop(const transport::Remote& remote);

 private:
  std::atomic<std::size_t> admitted_{0};
  Guarded<std::vector<Kept>> kept_;
};

}  // namespace convoy::agent
