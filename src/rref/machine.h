#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "agent/seen_numbers.h"
#include "base/function_ref.h"
#include "rref/entry.h"
#include "rref/ids.h"
#include "rref/link.h"

namespace convoy::rref {

struct MachineOptions {
  WorkerId self = 0;
  Incarnation incarnation = 0;
  std::string name = {};
  LinkTimes times = {};
  // After which the receiver of an answer is asked whether it has the references in it.
  std::chrono::nanoseconds ask_after = std::chrono::seconds(2);
  // Whether a call of ours may still be answered: its callee, its number. Called in hear().
  std::function<bool(WorkerId, std::uint64_t)> under_way = nullptr;
};

// How a message that had references in it ended.
enum class Passage {
  kDelivered,  // it was taken: the call was answered, and not by an error
  kNotSent,    // it never left
  kUnknown,    // neither is known: an error, a time-out, a loss
};

// What to do once the machine's lock is free.
struct Output {
  std::vector<std::function<void()>> calls;  // callbacks
  std::vector<Value> values;                 // to be dropped
  // Whether they live must be found out: met() or lost() follows, now or some time.
  std::vector<std::pair<WorkerId, Incarnation>> watch;

  bool empty() const { return calls.empty() && values.empty() && watch.empty(); }
};

// The references of one worker: values here and who refers to them; references here to values of
// others; references on their way. docs/reference/rref.md has the protocol and why it holds:
//  1. the owner hears of the end of every reference: by kDelete, or because its worker is lost;
//  2. a reference does not end before the owner knows of those that were made of it: it is pinned
//     by each passage until the receiver says kAccept or kRefuse, or its call was answered.
//
// It has neither threads nor a lock nor a clock: all calls are made under one lock, after at(),
// and output() is carried out without it. An entry lives until its handles and pins are gone.
class Machine {
 public:
  explicit Machine(const MachineOptions& options);
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;
  ~Machine();

  void at(Time now) { now_ = now; }
  Output output();

  // --- others ---

  void met(WorkerId worker, Incarnation incarnation, const std::string& name);
  // It ended, or its connection did; for good.
  void lost(WorkerId worker, Incarnation incarnation, const std::string& why);
  void reconnected(WorkerId worker, Incarnation incarnation);

  // --- letters ---

  // Throws kInvalidArgument for nonsense.
  void hear(WorkerId from, std::span<const std::byte> letter);
  using Send = FunctionRef<void(WorkerId to, std::string&& letter)>;
  // What is due by now.
  void collect(Send send);
  // When collect() has something to do, or before that.
  Time next() const { return closed_ ? Time::max() : next_; }

  // --- values (machine_values.cpp) ---

  // All these return an entry with a handle for the caller.
  Entry* make(Value value);
  Entry* create(WorkerId owner);
  void creation_ended(Entry& entry, const Failure* failure);
  Entry* begin(WorkerId from, const CreationHead& head);
  void set_value(Entry& entry, Value&& value);
  void set_failure(Entry& entry, const Failure& failure);
  void when_value(Entry& entry, ValueCallback&& callback);
  // Empty if it is not there now.
  Value ready_value(const RRefId& id) const;
  // Another worker wants it.
  void when_value(WorkerId from, const RRefId& id, ValueCallback&& callback);

  // --- references (machine_users.cpp) ---

  // A handle of an entry, which may be gone then.
  void drop(Entry& entry);
  void when_confirmed(Entry& entry, Callback&& callback);
  // The same, but for those that this worker creates: it knows of them.
  void when_settled(Entry& entry, Callback&& callback);
  void when_lost(Entry& entry, Callback&& callback);
  std::optional<Failure> failure(const Entry& entry) const;

  Passed pass(Entry& entry, WorkerId to, std::optional<std::uint64_t> answer_to);
  void passed(WorkerId to, const Passed& reference, Passage how);
  Entry* take(WorkerId from, const Passed& passed);

  // --- the end ---

  // All references here are of no use from now on; their owners are told.
  void end_users(const Failure& why);
  // Also values here; nothing more is sent.
  void close(const Failure& why);
  // Nothing is on its way: neither records nor passages nor confirmations.
  bool settled() const;
  // And nobody refers to values here.
  bool drained() const;
  std::vector<std::string> holders() const;
  std::vector<std::string> unsettled() const;
  // Grows with everything that happens between workers.
  std::uint64_t activity() const { return activity_; }
  DebugInfo debug_info() const;
  std::size_t users() const;
  std::size_t owned() const { return owned_.size(); }

 private:
  // `by`: another worker tells of it. kInvalidArgument if that one tells of too many.
  Party& party(WorkerId worker, Incarnation incarnation, Party* by = nullptr);
  Party& current(WorkerId worker);
  std::string name_of(WorkerId worker) const;
  std::string describe(const RRefId& id) const;
  void put(Party& to, Record record, Link::When when);
  void apply(Party& from, const Record& record);
  void look_at(const Party& known);  // its link, or what is to be asked, has changed

  // Values.
  Entry* find_owned(const RRefId& id, WorkerId by, Failure& why);
  Entry* new_owned(const RRefId& id, EntryState state);
  void hear_request(Party& from, const Record& record);
  void hear_delete(Party& from, const Record& record);
  void hear_abandon(Party& from, const Record& record);
  void begun(Entry& entry);
  void uncount(Entry& entry);
  void fail_expected(Entry& entry, const Failure& failure);
  void tell_value(Entry& entry);
  void remove_fork(Entry& entry, const Party& user, std::uint64_t number);
  void free_if_unused(Entry& entry);

  // Users.
  Entry* new_user(const RRefId& id, Party& owner, EntryState state, std::uint64_t fork);
  Entry* dead_user(const Passed& passed, Party& owner, const Failure& failure);
  void require_known(const RRefId& id, const Party& owner) const;
  Entry* take_owned(WorkerId from, const Passed& passed);
  Entry* take_from_owner(const Passed& passed, Party& owner);
  Entry* take_from_user(const Passed& passed, Party& owner);
  void hear_confirm(Party& from, const Record& record);
  void hear_dead(Party& from, const Record& record);
  void die(Entry& entry, const Failure& failure, bool is_lost);
  void tell_confirmed(Entry& entry);
  void settle_passages(Entry& entry);
  void deregister(Entry& entry);
  void release(Entry& entry);

  // Passages.
  void hear_close(Party& from, const Record& record);
  void hear_settled(Party& from, const Record& record);
  void end_passage(Party& to, std::uint64_t number, bool taken);
  void ask_again();

  void call(Callback&& callback, const Failure* failure);
  void call(ValueCallback&& callback, const Value* value, const Failure* failure);

  const MachineOptions options_;
  Time now_{};
  Time next_ = Time::max();
  Output output_;
  std::deque<Record> local_;  // to this worker itself
  bool closed_ = false;
  Failure closed_why_;
  std::map<std::pair<WorkerId, Incarnation>, std::unique_ptr<Party>> parties_;
  std::map<WorkerId, Party*> current_;
  std::unordered_map<RRefId, Entry*, RRefIdHash> owned_;
  std::uint64_t next_own_ = 1;
  std::uint64_t activity_ = 0;
};

}  // namespace convoy::rref
