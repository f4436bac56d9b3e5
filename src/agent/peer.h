#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "agent/call.h"
#include "agent/functions.h"
#include "agent/letters.h"
#include "agent/request.h"
#include "agent/seen_numbers.h"
#include "agent/stats.h"

// What an agent knows of one worker. Included by the files that implement Agent.
namespace convoy::agent {

// Requests outlive agents: they ask here whether theirs is still there.
struct AgentLife {
  explicit AgentLife(Agent& owner) : agent(owner) {}

  Agent& agent;

  // While one lives on this thread, the agent does, too: a handler of it runs here.
  class Scope {
   public:
    explicit Scope(const AgentLife& life) noexcept;
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope();

   private:
    const AgentLife* const before_;
  };

  // True: the agent stays until leave().
  bool enter() noexcept {
    if (is_here()) return true;
    if ((users_.fetch_add(2, std::memory_order_acquire) & 1) == 0) return true;
    users_.fetch_sub(2, std::memory_order_release);
    return false;
  }
  void leave() noexcept {
    if (!is_here()) users_.fetch_sub(2, std::memory_order_release);
  }
  // Nobody enters any more; waits for those who have.
  void end() noexcept;

 private:
  bool is_here() const noexcept;

  std::atomic<std::uint64_t> users_{0};  // 2 for each; 1: it has ended
};

// A function that others may call.
struct Function {
  Function(const Handler& chosen, FunctionId number) : handler(chosen), id(number) {}

  const Handler handler;
  const FunctionId id;
  // What a run takes, in nanoseconds; 0: not known yet.
  std::atomic<std::uint64_t> average{0};
};

// A letter that waits for room, or for the connection.
struct QueuedLetter {
  transport::LetterKind kind = 0;
  bool reply = false;
  Call* call = nullptr;    // of a call: what comes before the body is written when it goes
  std::uint32_t slot = 0;  // the call's
  std::uint64_t number = 0;
  std::vector<std::byte> head;  // of other letters all of it, of calls the body
  std::vector<std::vector<std::byte>> data;
  std::vector<Piece> pieces;
  transport::Sent on_sent;
};

// Is a letter one that may be overtaken, and takes long to send?
bool is_large(std::span<const Piece> pieces);
std::size_t bytes_of(const Outgoing& outgoing);

struct Peer {
  Peer(Worker who, transport::Address where) : worker(std::move(who)), address(std::move(where)) {}

  const Worker worker;
  const transport::Address address;
  std::atomic<transport::Remote*> remote{nullptr};  // once there is a connection
  std::atomic<bool> wrote{false};                   // something after its hello

  mutable std::mutex mutex;
  // All that follows is guarded by it.

  // The connection. It is open when the other has told that it knows us: letters go then.
  bool known = false;  // has told who it is, and what it has to call
  bool open = false;
  bool lost = false;
  bool leaves = false;  // the others know that it leaves; its goodbye is under way
  bool left = false;    // said goodbye
  std::string why;      // it is lost
  Deadline::Clock::time_point hello_again = Deadline::Clock::time_point::max();
  std::array<std::deque<QueuedLetter>, 2> queues;  // small ones, large ones
  bool flushing = false;                           // large ones are being sent
  bool flush_again = false;

  // What it has to call.
  std::vector<TableEntry> table;
  std::unordered_multimap<std::string, std::uint32_t> by_name;
  static constexpr std::int64_t kUnknown = -1;  // not looked for yet
  static constexpr std::int64_t kMissing = -2;
  std::vector<std::int64_t> places;  // in the table, by FunctionId

  // Our calls to it, by number.
  std::uint64_t next_number = 1;
  Call* first_call = nullptr;
  Call* last_call = nullptr;
  std::vector<Call*> slots;
  std::vector<std::uint32_t> free_slots;
  std::size_t calls = 0;
  std::size_t bytes = 0;

  // Its calls.
  SeenNumbers seen;
  Request* first_request = nullptr;
  Request* last_request = nullptr;
  std::size_t requests = 0;

  std::vector<FunctionStats> counters;  // by FunctionId; without names

  // --- with the mutex held ---

  void link(Call& call);
  // Of the answer; nullptr: nobody waits for it.
  Call* take(std::uint32_t slot, std::uint64_t number);
  void unlink(Call& call);
  // Whether it is that call, and under way; `call` may be gone.
  bool is_linked(const Call* call, std::uint32_t slot, std::uint64_t number) const {
    return slot < slots.size() && slots[slot] == call && call && call->number_ == number;
  }
  void link(Request& request);
  void unlink(Request& request);
  // A call that has not gone yet goes no more; its letter, which is to be dropped without the lock.
  std::optional<QueuedLetter> unqueue(const Call& call);

  std::int64_t place_of(FunctionId function);
  // Why there is no place for it.
  std::string describe_missing(FunctionId function) const;
  FunctionStats& counters_of(FunctionId function);
  void count_error(const Call& call);
  std::uint64_t floor() const { return first_call ? first_call->number_ : next_number; }
};

}  // namespace convoy::agent
