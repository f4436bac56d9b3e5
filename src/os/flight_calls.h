#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "os/flight_log.h"

namespace convoy::flight {

// The calls of RPC in the flight records of a job, by which each side of a call finds the other.
// Refers to the logs.
class Calls {
 public:
  explicit Calls(const std::vector<Log>& job);

  struct Side {
    const Log* log = nullptr;
    const Entry* entry = nullptr;
  };
  // What the other worker has of that call; no entry: nothing. No log: there is none of it.
  Side other(const Log& log, const Entry& entry) const;
  // Of a backward pass: the parts that other workers have in it, by rank.
  std::vector<Side> parts(const Log& log, const Entry& pass) const;
  // Of such a part: whether the pass is under way at its root.
  bool has_root(const Log& log, const Entry& part) const;
  const std::vector<Log>& job() const { return job_; }

 private:
  struct Key {
    std::uint64_t session;
    int rank;  // of the worker whose log it is
    int peer;  // of the other
    bool served;
    std::uint64_t number;
    friend bool operator==(const Key&, const Key&) = default;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const;
  };
  // nullopt: its session is not known, or it goes to all.
  static std::optional<Key> key_of(const Log& log, const Entry& entry);

  const std::vector<Log>& job_;
  std::unordered_map<Key, Side, Hash> sides_;
};

// "worker2 (rank 2)": whose call it is, or who runs it.
std::string worker_of(const Log& log, const Entry& entry);
// The name of the other worker.
std::string peer_of(const Log& log, const Entry& entry);

// What a rank waits for and what it runs, as of `now`, oldest first; at most `most` lines, and one
// that counts the rest:
//   worker2 (rank 2): waits since 12.3 s for worker0: train_step, call 417; it runs there since ...
//   worker0 (rank 0): runs since 12.2 s for worker2: train_step, call 417
//   worker0 (rank 0): backward pass 3 since 12.3 s, waits for gradients; worker1 runs since 12.2 s
//   worker1 (rank 1): backward pass 3 of worker0 since 12.3 s, runs since 12.2 s
std::vector<std::string> calls_under_way(const Log& log, const Calls& calls, std::size_t most,
                                         std::chrono::nanoseconds now);
// The same of all ranks: calls that were made at least so long ago, and what runs for callers that
// nobody knows.
std::vector<std::string> calls_under_way(const Calls& calls, std::size_t most,
                                         std::chrono::nanoseconds now,
                                         std::chrono::nanoseconds least = {});
// Its last calls that are over, oldest first.
std::vector<std::string> last_calls(const Log& log, std::size_t most, std::chrono::nanoseconds now);
// Who waited for a rank that ended then, or little before:
//   worker2 (rank 2) since 12.3 s: train_step, call 417, which ran there
std::vector<std::string> who_called(const Log& log, const Calls& calls, std::size_t most,
                                    std::chrono::nanoseconds end);

// A Chrome trace of all ranks: their calls, what runs for others, arrows between the two, and
// collectives. What is under way lasts until `now`.
std::string to_trace(const std::vector<Log>& job, std::chrono::nanoseconds now);

}  // namespace convoy::flight
