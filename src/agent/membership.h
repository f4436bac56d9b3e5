#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "agent/companion.h"
#include "base/guarded.h"
#include "convoy/deadline.h"
#include "convoy/store.h"

namespace convoy::agent {

// Who is in a session, from one change to the next.
struct View {
  std::uint64_t version = 0;
  std::vector<Worker> workers = {};  // by number
  // What is new since the version before.
  std::vector<Worker> joined = {};
  std::vector<Worker> left = {};
  std::vector<Worker> failed = {};
};

// Knows who is in a session, and tells who wants to know. Of a static session it counts those who
// go. Of one whose workers come and go, all changes are a log in the store: "event/1", "event/2",
// ..., of which each is written once. Its length is the version of the view; the number of a worker
// is that of its joining among all joinings, so one that comes back under its name has another.
// Whoever writes an event tells the others by a letter; who finds that it has missed one reads the
// log. No thread waits at the store.
//
// Thread-safe. Made before its agent meets anybody; the agent ends first.
class Membership final : public Companion {
 public:
  using OnChange = std::function<void(const View&)>;
  using OnLost = std::function<void(const Worker&, const Error&)>;

  static std::shared_ptr<Membership> make(Agent& agent);
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  // Of a static session: who is in it. When the agent knows that, and has heard nobody yet.
  void begin();
  // Becomes a worker of the session that the store's keys are of. kInvalidArgument for a name that
  // somebody has who is still there; what the store throws.
  struct Place {
    std::shared_ptr<Store> store;
    bool served_here = false;  // it goes with this process
  };
  void join(const Place& place, const Deadline& deadline);
  bool is_dynamic() const { return place_.store != nullptr; }
  // kInvalidArgument if this worker serves the store, and others are still there.
  void check_leave();
  // Writes down that this worker has gone.
  void leave() noexcept;

  View view();
  // Called for each view from now on, one after the other, on threads of the agent's pool. The view
  // before the first of them.
  View on_change(OnChange listener);
  // Called once, when the worker has left or failed; soon, if it has already.
  void on_lost(WorkerId worker, OnLost listener);
  // Once the agent has ended no callback begins. Waits until none runs, except on the agent's own
  // threads: one of them may be running such a callback.
  void wait_for_callbacks(const Deadline& deadline);

  // kTimeout; kCancelled if the agent is shut down.
  Worker wait_for(const std::string& name, const Deadline& deadline);

  // Reads what is new in the log. Nothing, if the store cannot be reached.
  void refresh() noexcept;

 private:
  enum class Kind : std::uint8_t { kJoined = 1, kLeft = 2, kFailed = 3 };
  struct Event {
    Kind kind = Kind::kJoined;
    WorkerId worker = 0;  // of those who go
    Member member = {};   // of those who come
  };
  struct Known {
    Worker worker;
    transport::Address address;
    std::optional<Kind> gone = {};
    std::optional<Error> why = {};  // it is lost here
  };
  struct State {
    std::uint64_t version = 0;
    std::vector<Known> known;
    std::vector<OnChange> listeners;
    std::vector<std::pair<WorkerId, OnLost>> lost_listeners;
    std::deque<View> untold;  // views that listeners have not seen
    bool telling = false;     // somebody does
    bool silent = false;      // the session is over: nobody is told any more
    int calls = 0;            // of users' callbacks, that run
  };

  static std::string encode(const Event& event);
  static Event decode(std::string_view text);
  static View view_of(const State& state);

  // What follows from changes. It calls users' callbacks, which may come back here: it goes when
  // order_ is free.
  class Following {
   public:
    explicit Following(Agent& agent) : agent_(agent) {}
    Following(const Following&) = delete;
    Following& operator=(const Following&) = delete;
    ~Following();

    std::vector<std::pair<WorkerId, std::optional<Error>>> dismissed;
    bool aborts = false;

   private:
    Agent& agent_;
  };

  // Under order_:
  void read_log(Following& following);
  void apply(const Event& event, bool admits, Following& following);
  bool append(const Event& event, Following& following);
  void require_free_name(const std::string& name, Following& following);

  // `version` is that of the view which the event made.
  void tell_others(const Event& event, std::uint64_t version);
  void report(WorkerId worker, Kind kind) noexcept;
  void hear(std::span<const std::byte> body);
  void publish(State& state, View view);
  void tell_listeners();
  template <class Listener, class... Arguments>
  void call_listener(const Listener& listener, const Arguments&... arguments) noexcept;

  explicit Membership(Agent& agent) : agent_(agent) {}
  // Companion.
  void gone(const Worker& worker, const std::string& why) noexcept override;
  bool idle() override { return true; }
  std::uint64_t activity() override { return 0; }
  std::vector<std::string> under_way() override { return {}; }
  void finish() override {}
  void closed() noexcept override;

  Agent& agent_;
  Place place_;
  std::mutex order_;  // of changes; taken before state_
  std::string store_lost_;
  Guarded<State> state_;
};

}  // namespace convoy::agent
