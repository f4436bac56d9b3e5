#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "convoy/call_site.h"
#include "os/flight_ring.h"
#include "os/segment.h"

namespace convoy::flight {

using Clock = std::chrono::steady_clock;

// An operation when it is called.
struct Operation {
  std::uint64_t group = 0;  // of add_group
  std::uint64_t number = 0;
  OperationText::Packed name{};
  TypeText::Packed type{};
  std::uint64_t input = 0;  // elements
  std::uint64_t output = 0;
  std::uint64_t bytes = 0;
  int peer = -1;  // of a message, or the root
  bool message = false;
};

struct GroupMember {
  std::string name;
  int rank = 0;
  int size = 0;
  std::vector<pid_t> processes;           // by rank; may be empty
  std::uint64_t session = 0;              // of RPC: what its workers, and no others, have in common
  std::vector<std::string> workers = {};  // their names, by rank
};

// A call of RPC when it is made, or has come.
struct Call {
  std::uint64_t group = 0;     // of add_group
  std::uint64_t number = 0;    // of the caller's calls to this callee
  std::uint64_t function = 0;  // of text()
  int peer = -1;               // the other worker; -1: all of them
  bool served = false;         // it is the other's
  // A backward pass of distributed autograd: `number` is its root's. `served`: a part in that of
  // `peer`. It is started while the engine runs, and delayed while it waits for gradients.
  bool pass = false;
};

// This process's flight record. Under `convoy run` it is in memory that the launcher holds as well,
// elsewhere in a memfd of its own, which other processes of the user find by number. Thread-safe;
// an operation costs one fetch_add, one compare_exchange and stores to two cache lines, a call to
// one. Nothing here throws: what cannot be written is not.
class Recorder {
 public:
  // That of the process; made by the first call, never destroyed. CONVOY_FLIGHT=off: it writes
  // nothing.
  static Recorder& instance();
  // On memory of all zeros, or no memory.
  explicit Recorder(Segment memory);
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // nullptr: nothing is written.
  const Ring* ring() const { return ring_; }
  std::size_t bytes() const { return memory_.size(); }
  int descriptor() const { return memory_.fd(); }

  // 0: there are too many groups; their operations are written without a name.
  std::uint64_t add_group(const GroupMember& group) noexcept;
  // Calls of a session that are still under way have failed.
  void remove_group(std::uint64_t id) noexcept;
  // Another worker of a session.
  void name_worker(std::uint64_t group, std::size_t rank, const std::string& name) noexcept;
  // The number of a text that records name; 0: there are too many.
  std::uint64_t text(std::string_view text) noexcept;

  // `started` false: it waits for its turn.
  using Ticket = std::uint64_t;
  Ticket begin(const Operation& operation, const CallSite& where, Clock::time_point now,
               bool started) noexcept;
  void start(Ticket ticket, Clock::time_point now) noexcept;
  void end(Ticket ticket, State state, Clock::time_point now) noexcept;

  // The same for calls, which have tickets of their own. One that is under way keeps its place: it
  // is what somebody looks for when a job hangs. If there are too many of them, later ones are not
  // written, and have ticket 0.
  Ticket begin_call(const Call& call, Clock::time_point now, bool started) noexcept;
  void start_call(Ticket ticket, Clock::time_point now) noexcept;
  void end_call(Ticket ticket, State state, Clock::time_point now) noexcept;
  // It waits for its turn, after all.
  void delay_call(Ticket ticket) noexcept;

 private:
  // Nullptr if newer operations have taken the place of this one.
  Record* find(Ticket ticket) noexcept;
  RecordHead* find_call(Ticket ticket) noexcept;
  void end_calls_of(std::uint64_t group) noexcept;
  std::uint64_t site_of(const CallSite& where) noexcept;

  const Segment memory_;
  Ring* const ring_;
  const std::size_t calls_;          // a power of two, or 0
  const unsigned generation_;        // fork_generation(): a forked child writes nothing
  std::array<Word, kSites> keys_{};  // of the sites: address of the file's name and line
  std::mutex mutex_;
  // Guarded by mutex_:
  std::array<bool, kGroups> taken_{};
  std::array<std::uint64_t, kGroups> uses_{};
  std::size_t next_group_ = 0;
  std::set<std::string, std::less<>> texts_;  // whose addresses are keys of sites
};

// Environment variable that tells a rank which inherited descriptor is its flight record; as
// CONVOY_STORE_FD.
inline constexpr const char* kFlightFdVariable = "CONVOY_FLIGHT_FD";
std::string flight_environment(int fd);
// New memory for rank `rank` of a job, and its last `calls` calls: what the launcher makes.
Segment make_memory(const std::string& job, int rank, std::size_t calls = kCalls);
// What /proc shows of such memory.
std::string memory_label(const std::string& job, int rank);

}  // namespace convoy::flight
