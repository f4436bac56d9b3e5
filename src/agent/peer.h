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

// The workers of an agent, and its calls and theirs. Included by the files that implement Agent.
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

// How well a worker is connected. Letters go while it is open: from when the other has told that it
// knows us, until it is lost. What is lost stays lost; it has left if it was lost by its own will.
struct Contact {
  bool known = false;  // has told who it is, and what it has to call
  bool open = false;   // not if lost
  bool lost = false;
  bool leaves = false;  // the others know that it leaves; its goodbye is under way
  bool left = false;    // lost, after a goodbye
  std::string why;      // it is lost
  // When it is greeted once more, if it is not open by then.
  Deadline::Clock::time_point hello_again = Deadline::Clock::time_point::max();

  // No error: it has left by itself.
  void lose(const std::optional<Error>& error);
};

// Letters to a worker that wait for room, or for the connection. Small ones go under the peer's
// lock; large ones do not, and by one thread at a time (`flushing`). Others tell it that there is
// room again (`flush_again`).
struct Outbox {
  std::array<std::deque<QueuedLetter>, 2> queues;  // small ones, large ones
  bool flushing = false;
  bool flush_again = false;

  bool is_empty() const { return queues[0].empty() && queues[1].empty(); }
  // A call that has not gone yet goes no more; its letter, which is to be dropped without the lock.
  std::optional<QueuedLetter> remove(const Call& call);
};

// What a worker has to call, as it has told, and where our functions are in that. `places` is what
// was looked up in `table`, and is forgotten with it.
struct RemoteFunctions {
  static constexpr std::int64_t kUnknown = -1;  // not looked for yet
  static constexpr std::int64_t kMissing = -2;

  std::vector<TableEntry> table;
  std::unordered_multimap<std::string, std::uint32_t> by_name;  // places in it
  std::vector<std::int64_t> places;                             // by FunctionId

  // Instead of what was told before.
  void learn(std::vector<TableEntry> told);
  std::int64_t place_of(FunctionId function);
  // Why there is no place for it on that worker.
  std::string describe_missing(FunctionId function, const std::string& worker) const;
};

// Our calls to a worker that are under way, by number: a list in the order of their numbers, and a
// slot for each, by which answers find them. A slot is free or has a call of the list; one that has
// ended has number 0.
struct CallList {
  std::uint64_t next_number = 1;
  Call* first = nullptr;
  Call* last = nullptr;
  std::vector<Call*> slots;
  std::vector<std::uint32_t> free_slots;
  std::size_t count = 0;
  std::size_t bytes = 0;

  void link(Call& call);
  // Of the answer; nullptr: nobody waits for it.
  Call* take(std::uint32_t slot, std::uint64_t number);
  void unlink(Call& call);
  // Whether it is that call, and under way; `call` may be gone.
  bool has(const Call* call, std::uint32_t slot, std::uint64_t number) const {
    return slot < slots.size() && slots[slot] == call && call && call->number_ == number;
  }
  // No call with a smaller number is under way.
  std::uint64_t floor() const { return first ? first->number_ : next_number; }
};

// A worker's calls to us: which of them have come, and, as a list, those that are not answered yet.
struct RequestList {
  SeenNumbers seen;
  Request* first = nullptr;
  Request* last = nullptr;
  std::size_t count = 0;

  void link(Request& request);
  void unlink(Request& request);
  // Nobody waits for any of them.
  void cancel_all();
};

// What an agent knows of one worker, itself included. It stays as long as the agent.
struct Peer {
  Peer(Worker who, transport::Address where) : worker(std::move(who)), address(std::move(where)) {}

  const Worker worker;
  const transport::Address address;
  std::atomic<transport::Remote*> remote{nullptr};  // once there is a connection
  std::atomic<bool> wrote{false};                   // something after its hello

  mutable std::mutex mutex;
  // All that follows is guarded by it.

  Contact contact;
  Outbox outbox;
  RemoteFunctions functions;
  CallList calls;
  RequestList requests;
  std::vector<FunctionStats> counters;  // by FunctionId; without names

  FunctionStats& counters_of(FunctionId function);
  void count_error(const Call& call);
};

}  // namespace convoy::agent
