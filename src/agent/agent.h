#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "agent/call.h"
#include "agent/call_record.h"
#include "agent/call_timer.h"
#include "agent/companion.h"
#include "agent/executor.h"
#include "agent/functions.h"
#include "agent/line_limit.h"
#include "agent/listeners.h"
#include "agent/request.h"
#include "agent/roster.h"
#include "agent/spare_requests.h"
#include "agent/stats.h"
#include "base/function_ref.h"
#include "base/guarded.h"
#include "base/id.h"
#include "convoy/deadline.h"
#include "convoy/store.h"
#include "os/fork_guard.h"
#include "transport/endpoint.h"

namespace convoy::agent {

struct CallHead;
struct GatherHead;
struct QueuedLetter;
enum class LetterType : transport::LetterKind;

// What to do when too much is on its way to one worker.
enum class WhenFull {
  kWait,   // until there is room, or the call's time is over
  kThrow,  // kResource
};

struct AgentOptions {
  std::string name;
  WorkerId rank = 0;
  // Of calls that do not say otherwise; 0: none.
  std::chrono::nanoseconds call_timeout = std::chrono::seconds(60);
  // Handlers that run at once.
  int threads = 16;
  // On their way to one worker, unanswered. One call always goes.
  std::size_t most_calls = 8192;
  std::size_t most_bytes = std::size_t{1} << 30;
  WhenFull when_full = WhenFull::kWait;
  std::vector<Handler> handlers = {};
  // On the thread that runs a handler, before it: a clean state of the thread.
  void (*enter_handler)() = nullptr;
  // Functions that were seen to take less than this run on the thread that serves; 0: none do.
  std::chrono::nanoseconds most_inline = std::chrono::microseconds(20);
  void* user = nullptr;  // Agent::user()

  // For tests: simulated and faulty endpoints, and threads of a simulation.
  std::function<std::unique_ptr<transport::Endpoint>(transport::Inbox&)> make_endpoint = nullptr;
  Executor::Starter start_thread = nullptr;
};

// A worker and how it is reached.
struct Member {
  std::string name;
  transport::Address address;
};

// One worker of a session: calls functions of the others by number, with bytes, and runs those that
// they call. It knows nothing of types. Each call ends once: with an answer, an error of the
// function, a time-out, a loss, or because it was cancelled; it is executed once at most.
//
// Threads: all methods may be called from any thread. Handlers run on threads of a pool, short ones
// on the thread that serves the endpoint; never on one that waits. Call::ended() is called by the
// thread that takes the answer: mostly that which waits for it.
//
// docs/internals/wire.md has what they write to each other, docs/reference/rpc.md what users see of
// it.
class Agent final : private transport::Inbox {
 public:
  // Not met by anybody yet: meet() or admit().
  explicit Agent(const AgentOptions& options);
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;
  // abort(), then waits for handlers. Not in a handler, nor in Call::ended(): see in_own_thread().
  // Not in a forked child: its owner leaves it alone there (DeleteAtHome).
  ~Agent() override;

  // Tells the others by the store, whose keys are this session's alone, and waits until all have
  // come. kInvalidArgument for names that are bad, or not unique; kTimeout for those who did not
  // come.
  void meet(Store& store, int size, const Deadline& deadline);
  const transport::Address& address() const { return endpoint_->address(); }
  // The same without a store. By rank; this one included.
  void admit(const Id& session, std::span<const Member> members);
  // The same for a session whose workers come and go (Membership): this one is worker `self`.
  void enter(const Id& session, WorkerId self, std::span<const Member> members);
  // One more, whose number is the next. One thread at a time.
  void admit_more(const Member& member);
  // It has left (no error), or was lost by another worker. What it sent before it left is heard
  // first.
  void dismiss(WorkerId worker, const std::optional<Error>& error) noexcept;
  // Somebody can be reached there.
  bool answers(const transport::Address& address);
  bool has_met() const { return roster_.has_begun(); }
  const std::string& name() const { return options_.name; }

  // --- workers ---

  const Worker& self() const;
  // kInvalidArgument: there is none. Of those that had the name, the one that came last.
  const Worker& worker(std::string_view name) const;
  const Worker* find_worker(std::string_view name) const;  // nullptr: there is none
  const Worker& worker(std::int64_t rank) const;
  std::vector<Worker> workers() const;
  bool is_lost(WorkerId worker) const;
  bool has_left(WorkerId worker) const;  // by itself
  void* user() const { return options_.user; }

  // --- calls ---

  // Throws before anything is done: kInvalidArgument (the call cannot be made, or the agent is shut
  // down), kResource (WhenFull::kThrow). Whatever happens later comes by ended(), perhaps before
  // this returns.
  void start(Call& call, WorkerId to, FunctionId function, Outgoing outgoing,
             const CallOptions& options = {});
  // Until it is over; its own time-out sees to that.
  void wait(Call& call);
  // Ends it with kCancelled and tells the callee. False: it has ended, or is about to.
  bool cancel(Call& call);

  // Until ready() or the deadline, by the endpoint's clock; this thread takes answers meanwhile.
  // Whoever makes ready() true outside of ended() must wake(). False: the deadline passed.
  bool wait(const Deadline& deadline, FunctionRef<bool()> ready);
  // The same for what no answer brings: this thread takes nothing.
  bool wait_aside(const Deadline& deadline, FunctionRef<bool()> ready);
  void wake() noexcept { endpoint_->wake(); }
  Deadline::Clock::time_point now() const { return endpoint_->now(); }

  std::chrono::nanoseconds call_timeout() const { return call_timeout_.load(); }
  void set_call_timeout(std::chrono::nanoseconds timeout) { call_timeout_.store(timeout); }

  // --- the other side ---

  // More to be called. Those who know this worker hear of it soon.
  void add_handlers(std::span<const Handler> handlers);
  // Runs on the pool, as a handler does. Dropped if the agent ends before.
  void post(std::function<void()> function);
  // Runs on this thread when the handler that it runs has returned; on the pool if it runs none, or
  // one that waits. It should be short: it may keep the thread that serves. Must not throw.
  void run_after_handler(std::function<void()> function);
  // This thread is one on which handlers or Call::ended() run, and does so just now.
  bool in_own_thread() const noexcept;

  // --- letters of other layers ---

  // Neither numbered nor answered; in order, if they have no large pieces. To who is lost: dropped.
  void send_letter(WorkerId to, transport::LetterKind kind, Outgoing outgoing);
  // On the thread that serves; it must be short. Before meet().
  using LetterHandler = Listeners::Letter;
  void on_letter(transport::LetterKind kind, LetterHandler handler);
  // Each worker, this one first, before anything of it is heard. Before meet().
  void on_admitted(std::function<void(WorkerId)> handler);
  // On the thread that serves: somebody says hello who is no worker that this one knows. It is
  // heard again when it is admitted. Before meet().
  void on_stranger(std::function<void()> handler);
  // On the thread that serves. Before meet().
  void on_lost(std::function<void(const Worker&, const Error&)> handler);

  // Hears of everything; stays as long as the agent. Before meet().
  void accompany(std::shared_ptr<Companion> companion);
  const transport::Address& address_of(WorkerId worker) const;
  // A call of ours to it that may still be answered (Request::number()).
  bool is_under_way(WorkerId worker, std::uint64_t number) const;
  // If it is gone, Companion::gone() says so: without this only if there ever was a connection.
  void watch(WorkerId worker) noexcept;
  // Not before that time, on the thread that serves.
  transport::Endpoint::TimerId call_at(Deadline::Clock::time_point when,
                                       std::function<void()> function) {
    return endpoint_->call_at(when, std::move(function));
  }
  bool cancel_timer(transport::Endpoint::TimerId timer) { return endpoint_->cancel(timer); }
  // A companion may be idle now.
  void look_if_idle() noexcept {
    if (ending_.awaits_idle.load(std::memory_order_relaxed) != 0) endpoint_->wake();
  }
  // What the flight record says of this session.
  CallRecord& record() { return record_; }
  // For those who may outlive the agent.
  const std::shared_ptr<AgentLife>& life() const { return life_; }

  // --- all together ---

  // What each of `who` gives, in their order; all of them call it with the same. Calls for the same
  // ones pair by their order. kTimeout names those who have not come, kPeerLost who never will.
  std::vector<std::string> all_gather(std::string_view mine, std::span<const WorkerId> who,
                                      const Deadline& deadline);
  void barrier(std::span<const WorkerId> who, const Deadline& deadline);

  // All workers call it. Waits until no call is under way anywhere, and companions have finished,
  // then ends. kTimeout says who
  // blocks, and by what; it may be called again then, or abort().
  void shutdown(const Deadline& deadline);
  // Calls that are under way end with kCancelled, here; others hear that this worker has left.
  void abort() noexcept;
  bool is_shut_down() const { return ending_.closed.load(); }
  // kUnsupported in a forked child of the process that made it.
  void require_home() const;

  AgentStats stats() const;
  // What is under way: "call of my_add to worker1 since 3.2 s", "my_add for worker2 since 1 s".
  std::vector<std::string> under_way() const;

 private:
  friend class Request;
  struct Placed;
  struct Gathers;
  class Tick;

  // Inbox.
  std::span<std::byte> place(transport::Remote& remote, const transport::Arrival& arrival,
                             std::size_t piece, std::size_t bytes) noexcept override;
  void arrived(transport::Remote& remote, transport::Arrival&& arrival) noexcept override;
  void lost(transport::Remote& remote, const Error& error) noexcept override;
  void joined(transport::Remote&) noexcept override {}
  void room(transport::Remote& remote) noexcept override;

  // agent.cpp: workers, connections.
  void begin(const Id& session, Roster::Names names, Roster::Growth growth);
  void hear_early();
  Peer& peer(WorkerId worker) const;
  void connect(Peer& peer);
  void say_hello(Peer& peer, bool asks);
  void hear_hello(transport::Remote& remote, std::span<const std::byte> head,
                  std::span<const std::byte> table);
  void take_letter(Peer& peer, transport::Arrival& arrival);
  void adopt_parts(std::vector<Part>& parts);
  void lose(Peer& peer, const std::optional<Error>& error) noexcept;

  // agent_send.cpp: letters, as there is room.
  using Lock = std::unique_lock<std::mutex>;
  struct Ended;
  // Lets go of the lock. Throws what Remote::try_send throws; nothing was done then.
  void send(Peer& peer, Lock& lock, LetterType type, std::span<const std::byte> head,
            Outgoing& outgoing, Call* call = nullptr);
  transport::SendResult try_send(Peer& peer, Lock& lock, const QueuedLetter& letter, Ended& ended);
  void flush(Peer& peer) noexcept;
  void flush_queue(Peer& peer, Lock& lock, bool large, Ended& ended);
  CallHead head_of(Peer& peer, const Call& call, std::chrono::nanoseconds remaining) const;

  // agent_calls.cpp: ours.
  Failure failure_of(const Call& call, ErrorKind kind, std::string_view why) const;
  bool wait_for_room(Peer& peer, Lock& lock, std::size_t bytes, const Deadline& deadline);
  void hear_reply(Peer& peer, transport::Arrival& arrival);
  void hear_error(Peer& peer, transport::Arrival& arrival);
  // Ends it if nobody else has, and tells the callee.
  bool give_up(Call& call, ErrorKind kind);
  static std::string out_of_time(const Call& call);
  void retract(Peer& peer, Call& call, Ended& ended);
  void say_cancelled(Peer& peer, std::span<const std::uint64_t> numbers) noexcept;
  Deadline::Clock::time_point quick_now() const;
  void arm(Deadline::Clock::time_point when);
  void look_at_time();

  // agent_serve.cpp: others'.
  void hear_call(Peer& peer, transport::Arrival& arrival);
  void hear_cancel(Peer& peer, const transport::Arrival& arrival);
  void run(Request& request) noexcept;
  void run(Request& request, Deadline::Clock::time_point began) noexcept;
  void handler_waits() noexcept;
  // False: it does not go.
  bool answer(Request& request, LetterType type, Outgoing& outgoing) noexcept;
  void answer_error(Request& request, ErrorKind kind, std::string_view type,
                    std::string_view text) noexcept;
  void say_error(Peer& peer, Lock& lock, std::uint32_t slot, std::uint64_t number, ErrorKind kind,
                 std::string_view type, std::string_view text) noexcept;

  // agent_together.cpp
  bool is_idle();
  std::string describe_under_way();
  bool settle(const Deadline& deadline);
  void hear_gather(Peer& peer, transport::Arrival& arrival);
  std::string together(const char* what, std::size_t workers) const;
  void hear_gather_ask(Peer& peer, const transport::Arrival& arrival);
  void send_value(Peer& peer, const GatherHead& head, std::string_view value);
  void ask_for_value(Peer& peer, const GatherHead& head) noexcept;

  // How far the session's end is here. Written by shutdown() and abort(); each call reads it, so
  // there is no lock.
  struct Ending {
    std::atomic<bool> closed{false};    // stays true: no call begins, nothing that arrives is heard
    std::atomic<bool> draining{false};  // shutdown() runs: it hears of queues that become empty
    std::atomic<int> awaits_idle{0};    // threads in shutdown() that wait for the end of requests
  };
  // What was done so far: counters that only grow. Whoever does it counts it. stats() reads them,
  // and shutdown(), which compares two moments.
  struct Counts {
    std::atomic<std::uint64_t> started{0};  // calls
    std::atomic<std::uint64_t> taken{0};    // requests
    std::atomic<std::uint64_t> inline_runs{0};
    std::atomic<std::uint64_t> takeovers{0};
  };
  struct Functions;

  const HomeProcess home_;
  AgentOptions options_;  // constant once it has met the others
  std::atomic<std::chrono::nanoseconds> call_timeout_;
  Ending ending_;
  const std::shared_ptr<AgentLife> life_;

  // The others. Written by the thread that admits them.
  Roster roster_;
  EarlyHellos early_hellos_;
  Guarded<LineLimit> complaints_;  // of the log

  // What others may call, and who hears of what happens here.
  CallRecord record_;
  const std::unique_ptr<Functions> functions_;
  Listeners listeners_;

  // What is under way, beside what each Peer has: any thread writes it.
  const std::unique_ptr<Gathers> gathers_;
  const std::unique_ptr<Placed> placed_;
  CallTimer timer_;
  SpareRequests spare_requests_;
  Counts counts_;

  Executor executor_;
  std::unique_ptr<Tick> tick_;
  std::unique_ptr<transport::Endpoint> owned_endpoint_;
  transport::Endpoint* endpoint_ = nullptr;  // also while that is destroyed
};

}  // namespace convoy::agent
