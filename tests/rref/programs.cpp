#include "programs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "agent/seen_numbers.h"
#include "base/concat.h"
#include "base/error.h"
#include "base/random.h"
#include "rref/machine.h"
#include "rref/records.h"
#include "transport/faulty.h"
#include "transport/simulation.h"

namespace convoy::rref::test {
namespace {

using namespace std::chrono_literals;
using transport::Arrival;
using transport::Endpoint;
using transport::Fault;
using transport::Remote;
using transport::World;

constexpr transport::LetterKind kCall = 2;
constexpr transport::LetterKind kReply = 3;

// Calls, as an agent makes them: each is executed once at most, and ends once.
enum class What : std::uint32_t { kCreate, kUse, kFetch };
struct CallFields {
  std::uint64_t number = 0;
  What what = What::kUse;
  std::uint32_t count = 0;  // references
  CreationHead creation;    // or the id that is fetched
};
enum class Answer : std::uint32_t { kGood, kError, kNoValue, kDeleted };
struct ReplyFields {
  std::uint64_t number = 0;
  Answer answer = Answer::kGood;
  std::uint32_t count = 0;
};

template <class Fields>
std::string to_bytes(const Fields& fields, const std::vector<Passed>& passed) {
  std::string bytes(sizeof fields + passed.size() * sizeof(Passed), '\0');
  std::memcpy(bytes.data(), &fields, sizeof fields);
  if (!passed.empty()) {
    std::memcpy(bytes.data() + sizeof fields, passed.data(), passed.size() * sizeof(Passed));
  }
  return bytes;
}

template <class Fields>
std::pair<Fields, std::vector<Passed>> from_bytes(std::span<const std::byte> bytes) {
  Fields fields;
  std::memcpy(&fields, bytes.data(), sizeof fields);
  std::vector<Passed> passed(fields.count);
  if (!passed.empty()) {
    std::memcpy(passed.data(), bytes.data() + sizeof fields, passed.size() * sizeof(Passed));
  }
  return {fields, passed};
}

class Node;

// What is true, whoever knows it.
class Program {
 public:
  explicit Program(std::uint64_t seed);
  ~Program();
  void run();

  World& world() { return world_; }
  Random& random() { return random_; }
  bool over() const { return over_; }
  bool strict() const { return !crashes_ && fault_.cut == 0; }
  std::size_t workers() const { return workers_; }
  const LinkTimes& times() const { return times_; }
  std::chrono::nanoseconds ask_after() const { return ask_after_; }
  bool drops_much() const { return drops_much_; }
  std::unique_ptr<Endpoint> make_endpoint(transport::Inbox& inbox, const std::string& name,
                                          Endpoint*& inner);
  bool lives(WorkerId worker, Incarnation incarnation) const;

  Value new_value(const std::shared_ptr<RRefId>& id);
  void creation_failed(const RRefId& id) { failed_.insert(id); }
  void creation_began(const RRefId& id) { begun_.insert(id); }
  // Of somebody else's reference, or of a creator's.
  void died(const RRefId& id, WorkerId at, const std::string& why);

 private:
  void start(WorkerId worker);
  void introduce(Node& node, const Node& other);
  void crash();
  void freed(const RRefId& id, Incarnation owner);
  void check();
  std::string describe() const;

  const std::uint64_t seed_;
  Random random_;
  World world_;
  std::size_t workers_ = 0;
  Fault fault_;
  LinkTimes times_;
  std::chrono::nanoseconds ask_after_{};
  bool drops_much_ = false;
  bool crashes_ = false;
  bool over_ = false;    // nothing new is begun
  bool ending_ = false;  // nothing is judged any more
  std::deque<std::unique_ptr<Node>> nodes_;
  std::map<WorkerId, Node*> now_;
  std::set<RRefId> failed_;
  std::set<RRefId> begun_;
  std::map<Incarnation, int> alive_;  // values, by owner
  Incarnation next_incarnation_ = 1;
};

// A worker.
class Node final : public transport::Inbox {
 public:
  Node(Program& program, WorkerId id, Incarnation incarnation)
      : program_(program), id_(id), incarnation_(incarnation) {
    MachineOptions options{.self = id, .incarnation = incarnation, .name = concat("worker", id)};
    options.times = program.times();
    options.ask_after = program.ask_after();
    options.under_way = [this](WorkerId to, std::uint64_t number) {
      return calls_.contains({to, number});
    };
    machine_ = std::make_unique<Machine>(options);
    endpoint_ = program.make_endpoint(*this, options.name, inner_);
  }

  WorkerId id() const { return id_; }
  Incarnation incarnation() const { return incarnation_; }
  const transport::Address& address() const { return endpoint_->address(); }
  Machine& machine() { return *machine_; }
  Endpoint& inner() { return *inner_; }
  bool crashed = false;
  const std::vector<Entry*>& held() const { return held_; }
  std::size_t calls() const { return calls_.size(); }
  int waits = 0;  // for callbacks

  bool knows(WorkerId worker, Incarnation incarnation) const {
    const auto found = others_.find(worker);
    return found != others_.end() && found->second->incarnation == incarnation &&
           !found->second->lost;
  }

  void meet(WorkerId worker, Incarnation incarnation, const transport::Address& address) {
    Other& other = *all_others_.emplace_back(std::make_unique<Other>(worker, incarnation));
    const auto before = others_.find(worker);
    if (before != others_.end()) lose(*before->second, "another process has its name");
    others_[worker] = &other;
    enter().met(worker, incarnation, concat("worker", worker));
    try {
      Remote& remote = endpoint_->remote(address);
      other.remote = &remote;
      remote.user.store(&other);
      if (remote.lost()) lose(other, "it is gone");
    } catch (const Error& error) {
      lose(other, error.what());
    }
    pump();
  }

  void hear_gone(WorkerId worker, Incarnation incarnation) {
    enter().lost(worker, incarnation, "it is gone");
    pump();
  }

  // One step of the program.
  void act() {
    if (crashed) return;
    Random& random = program_.random();
    const auto to = static_cast<WorkerId>(random.below(program_.workers()));
    switch (random.below(program_.drops_much() ? 14 : 10)) {
      case 0:
      case 1: create(to); break;
      case 2: make(); break;
      case 3:
      case 4:
      case 5: pass(to); break;
      case 6: fetch(); break;
      default: drop_some(); break;
    }
    pump();
  }

  void drop_all() {
    if (crashed) return;
    for (Entry* const entry : std::exchange(bag_, {})) drop(entry);
    pump();
  }

 private:
  struct Other {
    Other(WorkerId which, Incarnation number) : worker(which), incarnation(number) {}
    const WorkerId worker;
    const Incarnation incarnation;
    Remote* remote = nullptr;
    bool lost = false;
    std::uint64_t next_call = 1;
    agent::SeenNumbers seen;  // its calls
  };
  struct OutCall {
    What what;
    Other* to;
    std::vector<Passed> passed;
    Entry* entry = nullptr;  // that is created, or fetched: with a handle
    Endpoint::TimerId timer = 0;
  };

  Machine& enter() {
    machine_->at(program_.world().now());
    return *machine_;
  }

  // --- handles ---

  void hold(Entry* entry, std::vector<Entry*>& where) {
    held_.push_back(entry);
    where.push_back(entry);
  }
  void drop(Entry* entry) {
    held_.erase(std::find(held_.begin(), held_.end(), entry));
    enter().drop(*entry);
  }
  void drop_some() {
    if (bag_.empty()) return;
    const std::size_t which = program_.random().below(bag_.size());
    Entry* const entry = bag_[which];
    bag_.erase(bag_.begin() + static_cast<std::ptrdiff_t>(which));
    drop(entry);
  }
  Entry* any() { return bag_[program_.random().below(bag_.size())]; }
  bool is_dead(const Entry& entry) {
    if (entry.state != EntryState::kDead) return false;
    program_.died(entry.id, id_, entry.failure->text);
    return true;
  }

  // --- calls of ours ---

  void start(OutCall call, const CreationHead& creation) {
    Other& other = *call.to;
    const std::uint64_t number = other.next_call++;
    const CallFields fields{number, call.what, static_cast<std::uint32_t>(call.passed.size()),
                            creation};
    const std::string bytes = to_bytes(fields, call.passed);
    const auto key = std::pair(other.worker, number);
    if (other.lost) {
      calls_.emplace(key, std::move(call));
      return end(key, Failure{ErrorKind::kPeerLost, "its connection is lost", "", ""});
    }
    const auto timeout = std::chrono::microseconds(500 + program_.random().below(40'000));
    call.timer = endpoint_->call_at(program_.world().now() + timeout, [this, key] {
      end(key, Failure{ErrorKind::kTimeout, "RRef creation: timed out", "", ""});
      pump();
    });
    calls_.emplace(key, std::move(call));
    send(other, kCall, bytes);
  }

  void end(std::pair<WorkerId, std::uint64_t> key, const std::optional<Failure>& failure,
           Answer answer = Answer::kGood) {
    const auto found = calls_.find(key);
    if (found == calls_.end()) return;
    OutCall call = std::move(found->second);
    calls_.erase(found);
    if (call.timer != 0) endpoint_->cancel(call.timer);
    Machine& machine = enter();
    for (const Passed& each : call.passed) {
      // The worker may be another by now.
      if (others_.at(key.first) != call.to) break;
      machine.passed(key.first, each, failure ? Passage::kUnknown : Passage::kDelivered);
    }
    if (call.what == What::kCreate) {
      if (failure) program_.creation_failed(call.entry->id);
      machine.creation_ended(*call.entry, failure ? &*failure : nullptr);
    }
    if (call.what == What::kFetch && !failure && answer == Answer::kDeleted) {
      program_.died(call.entry->id, id_, "fetched: deleted");
    }
    if (call.entry) drop(call.entry);
  }

  void make() {
    const auto id = std::make_shared<RRefId>(RRefId{.owner = id_});
    Entry* const entry = enter().make(program_.new_value(id));
    *id = entry->id;
    hold(entry, bag_);
  }

  void create(WorkerId to) {
    if (!others_.contains(to)) return;
    Entry* const entry = enter().create(to);
    hold(entry, bag_);
    entry->handles.fetch_add(1);
    held_.push_back(entry);
    start({.what = What::kCreate, .to = others_.at(to), .passed = {}, .entry = entry},
          {entry->id, entry->fork});
  }

  void pass(WorkerId to) {
    if (bag_.empty() || !others_.contains(to)) return;
    std::vector<Passed> passed;
    for (std::uint64_t i = 1 + program_.random().below(3); i > 0; --i) {
      Entry* const entry = any();
      if (!is_dead(*entry)) passed.push_back(enter().pass(*entry, to, std::nullopt));
    }
    start({.what = What::kUse, .to = others_.at(to), .passed = passed}, {});
  }

  void fetch() {
    if (bag_.empty()) return;
    Entry* const entry = any();
    if (entry->is_owner || is_dead(*entry) || !others_.contains(entry->id.owner)) return;
    entry->handles.fetch_add(1);
    held_.push_back(entry);
    start({.what = What::kFetch, .to = others_.at(entry->id.owner), .passed = {}, .entry = entry},
          {entry->id, 0});
  }

  // --- calls of others ---

  void serve(Other& from, std::span<const std::byte> bytes) {
    const auto [fields, passed] = from_bytes<CallFields>(bytes);
    if (!from.seen.add(fields.number, 0)) return;
    switch (fields.what) {
      case What::kCreate: return serve_create(from, fields);
      case What::kUse: return serve_use(from, fields, passed);
      case What::kFetch: return serve_fetch(from, fields);
    }
  }

  void reply(Other& to, std::uint64_t number, Answer answer,
             const std::vector<Passed>& passed = {}) {
    send(to, kReply,
         to_bytes(ReplyFields{number, answer, static_cast<std::uint32_t>(passed.size())}, passed));
  }

  void serve_create(Other& from, const CallFields& fields) {
    Entry* entry = nullptr;
    try {
      entry = enter().begin(from.worker, fields.creation);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kCancelled) << error.what();
      return reply(from, fields.number, Answer::kError);
    }
    program_.creation_began(entry->id);
    held_.push_back(entry);
    ++waits;
    endpoint_->call_at(later(), [this, entry, &from, number = fields.number] {
      --waits;
      if (program_.random().below(8) == 0) {
        enter().set_failure(*entry, {ErrorKind::kRemote, "by chance", "", ""});
      } else {
        enter().set_value(*entry, program_.new_value(std::make_shared<RRefId>(entry->id)));
      }
      drop(entry);
      reply(from, number, Answer::kGood);
      pump();
    });
  }

  void serve_use(Other& from, const CallFields& fields, const std::vector<Passed>& passed) {
    struct Taking {
      std::vector<Entry*> entries;
      std::size_t left;
      bool dead = false;
    };
    auto taking = std::make_shared<Taking>();
    bool refused = false;
    for (const Passed& each : passed) {
      try {
        hold(enter().take(from.worker, each), taking->entries);
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kCancelled) << error.what();
        refused = true;
        break;
      }
    }
    if (refused) {
      for (Entry* const entry : taking->entries) drop(entry);
      return reply(from, fields.number, Answer::kError);
    }
    // The function starts when the owners know of all of them.
    taking->left = taking->entries.size() + 1;
    const auto settled = [this, taking, &from, number = fields.number](const Failure* failure) {
      if (failure) taking->dead = true;
      if (--taking->left != 0) return;
      --waits;
      run_use(from, number, taking->entries, taking->dead);
    };
    ++waits;
    for (Entry* const entry : taking->entries) {
      enter().when_settled(*entry, [this, entry, settled](const Failure* failure) {
        if (failure) program_.died(entry->id, id_, failure->text);
        settled(failure);
      });
    }
    settled(nullptr);
  }

  void run_use(Other& from, std::uint64_t number, const std::vector<Entry*>& entries, bool dead) {
    if (dead) {
      for (Entry* const entry : entries) drop(entry);
      return reply(from, number, Answer::kError);
    }
    ++waits;
    endpoint_->call_at(later(), [this, &from, number, entries] {
      --waits;
      // Some are kept, some are passed on, some come back.
      std::vector<Passed> back;
      for (Entry* const entry : entries) {
        if (!from.lost && program_.random().below(4) == 0 && !is_dead(*entry) &&
            others_.at(from.worker) == &from) {
          back.push_back(enter().pass(*entry, from.worker, number));
        }
        if (program_.over() || program_.random().below(program_.drops_much() ? 8 : 2) != 1) {
          drop(entry);
        } else {
          bag_.push_back(entry);
        }
      }
      if (!program_.over() && program_.random().below(3) == 0) {
        pass(static_cast<WorkerId>(program_.random().below(program_.workers())));
      }
      reply(from, number, Answer::kGood, back);
      pump();
    });
  }

  void serve_fetch(Other& from, const CallFields& fields) {
    ++waits;
    const auto answer = [this, &from, number = fields.number](const Value* value,
                                                              const Failure* failure) {
      --waits;
      const bool by_chance = failure && failure->text == "by chance";
      reply(from, number,
            value ? Answer::kGood : (by_chance ? Answer::kNoValue : Answer::kDeleted));
    };
    enter().when_value(from.worker, fields.creation.id, answer);
  }

  void hear_reply(Other& from, std::span<const std::byte> bytes) {
    const auto [fields, passed] = from_bytes<ReplyFields>(bytes);
    const auto key = std::pair(from.worker, fields.number);
    const auto found = calls_.find(key);
    if (found == calls_.end() || found->second.to != &from) return;  // too late
    for (const Passed& each : passed) {
      try {
        hold(enter().take(from.worker, each), bag_);
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kCancelled) << error.what();
        EXPECT_FALSE(program_.strict()) << "an answer that was waited for: " << error.what();
      }
    }
    if (program_.over()) drop_all();
    const Failure error{ErrorKind::kRemote, "it was refused", "", ""};
    end(key, fields.answer == Answer::kError ? std::optional(error) : std::nullopt, fields.answer);
  }

  Endpoint::Clock::time_point later() {
    return program_.world().now() + std::chrono::microseconds(program_.random().below(3000));
  }

  // --- letters ---

  void send(Other& to, transport::LetterKind kind, const std::string& bytes) {
    if (to.lost || !to.remote) return;
    // What finds no room is lost.
    to.remote->try_send(
        {.kind = kind, .reply = kind == kReply, .head = std::as_bytes(std::span(bytes))});
  }

  void pump() {
    for (;;) {
      Output output = enter().output();
      if (output.empty()) break;
      for (auto& call : output.calls) call();
      for (const auto& [worker, incarnation] : output.watch) {
        if (!knows(worker, incarnation) && !program_.lives(worker, incarnation)) {
          enter().lost(worker, incarnation, "it is gone");
        }
      }
    }
    enter().collect([&](WorkerId to, std::string&& letter) {
      const auto found = others_.find(to);
      if (found != others_.end()) send(*found->second, kReferenceLetter, letter);
    });
    const Time next = machine_->next();
    if (next >= armed_) return;
    if (timer_ != 0) endpoint_->cancel(timer_);
    armed_ = next;
    timer_ = endpoint_->call_at(next, [this] {
      armed_ = Time::max();
      timer_ = 0;
      pump();
    });
  }

  void arrived(Remote& remote, Arrival&& arrival) noexcept override {
    auto* const other = static_cast<Other*>(remote.user.load());
    if (!other || other->lost) return;
    switch (arrival.kind) {
      case kCall: serve(*other, arrival.head); break;
      case kReply: hear_reply(*other, arrival.head); break;
      default: enter().hear(other->worker, arrival.head); break;
    }
    pump();
  }

  void lost(Remote& remote, const Error& error) noexcept override {
    auto* const other = static_cast<Other*>(remote.user.load());
    if (!other) return;
    lose(*other, error.what());
    pump();
  }

  void lose(Other& other, const std::string& why) {
    if (std::exchange(other.lost, true)) return;
    std::vector<std::pair<WorkerId, std::uint64_t>> keys;
    for (const auto& [key, call] : calls_) {
      if (call.to == &other) keys.push_back(key);
    }
    const Failure failure{ErrorKind::kPeerLost, why, "", ""};
    for (const auto& key : keys) end(key, failure);
    enter().lost(other.worker, other.incarnation, why);
  }

  Program& program_;
  const WorkerId id_;
  const Incarnation incarnation_;
  std::vector<Entry*> bag_;
  std::vector<Entry*> held_;  // one for each handle
  std::map<std::pair<WorkerId, std::uint64_t>, OutCall> calls_;
  std::map<WorkerId, Other*> others_;
  std::vector<std::unique_ptr<Other>> all_others_;
  Time armed_ = Time::max();
  Endpoint::TimerId timer_ = 0;
  std::unique_ptr<Machine> machine_;
  Endpoint* inner_ = nullptr;
  std::unique_ptr<Endpoint> endpoint_;
};

// --- the program ---

Program::Program(std::uint64_t seed) : seed_(seed), random_(seed), world_({.seed = seed}) {
  workers_ = 2 + random_.below(3);
  const auto chance = [&](std::uint32_t most) {
    return random_.below(2) == 0 ? 0 : static_cast<std::uint32_t>(random_.below(most));
  };
  fault_ = {.drop = chance(200'000),
            .duplicate = chance(200'000),
            .reorder = chance(200'000),
            .delay = chance(300'000),
            .cut = random_.below(4) == 0 ? 3'000u : 0u,
            .most_delay = 5ms};
  crashes_ = random_.below(3) == 0;
  drops_much_ = random_.below(2) == 0;
  times_ = {.lazy = std::chrono::microseconds(random_.below(3) == 0 ? 0 : random_.below(500)),
            .acknowledge = std::chrono::microseconds(random_.below(2000)),
            .first_retry = std::chrono::microseconds(1000 + random_.below(10'000)),
            .last_retry = 40ms};
  ask_after_ = std::chrono::microseconds(300 + random_.below(20'000));
}

Program::~Program() { ending_ = true; }

std::unique_ptr<Endpoint> Program::make_endpoint(transport::Inbox& inbox, const std::string& name,
                                                 Endpoint*& inner) {
  return transport::make_faulty(inbox, {.seed = random_.next(), .rules = {fault_}},
                                [&](transport::Inbox& innermost) {
                                  auto endpoint = world_.join(innermost, name);
                                  inner = endpoint.get();
                                  return endpoint;
                                });
}

bool Program::lives(WorkerId worker, Incarnation incarnation) const {
  const auto found = now_.find(worker);
  return found != now_.end() && found->second->incarnation() == incarnation &&
         !found->second->crashed;
}

void Program::start(WorkerId worker) {
  Node& node =
      *nodes_.emplace_back(std::make_unique<Node>(*this, worker, 100 * next_incarnation_++));
  now_[worker] = &node;
  node.meet(worker, node.incarnation(), node.address());
  const bool first = nodes_.size() <= workers_;
  for (const auto& [other, known] : now_) {
    if (other == worker) continue;
    for (const auto& [whom, of] : {std::pair(&node, known), std::pair(known, &node)}) {
      if (first) {
        introduce(*whom, *of);
      } else {
        world_.call_after(std::chrono::microseconds(random_.below(20'000)),
                          [this, whom = whom, of = of] { introduce(*whom, *of); });
      }
    }
  }
  for (std::uint64_t i = 5 + random_.below(15); i > 0; --i) {
    world_.call_after(std::chrono::microseconds(random_.below(30'000)), [this, &node] {
      if (!over_) node.act();
    });
  }
}

void Program::introduce(Node& node, const Node& other) {
  if (node.crashed) return;
  if (now_.at(other.id()) == &other) {
    node.meet(other.id(), other.incarnation(), other.address());
  } else {
    node.hear_gone(other.id(), other.incarnation());  // there is another one
  }
}

void Program::crash() {
  const auto worker = static_cast<WorkerId>(random_.below(workers_));
  Node& node = *now_.at(worker);
  if (node.crashed) return;
  node.crashed = true;
  world_.crash(node.inner());
  if (random_.below(2) == 0) {
    world_.call_after(std::chrono::microseconds(random_.below(5'000)),
                      [this, worker] { start(worker); });
  }
}

Value Program::new_value(const std::shared_ptr<RRefId>& id) {
  const Incarnation owner = now_.at(id->owner)->incarnation();
  ++alive_[owner];
  return {std::shared_ptr<void>(this, [this, id, owner](void*) { freed(*id, owner); }), 1};
}

// A value is gone: nobody must have been able to ask for it.
void Program::freed(const RRefId& id, Incarnation owner) {
  if (ending_) return;
  --alive_[owner];
  // One that came when its creator had given up is nobody's.
  if (id.creator == id.owner && failed_.contains(id)) return;
  for (const auto& [worker, node] : now_) {
    if (node->crashed) continue;
    for (const Entry* const entry : node->held()) {
      if (entry->id != id || entry->state == EntryState::kDead || entry->is_owner) continue;
      if (strict()) {
        ADD_FAILURE() << "worker " << worker << " refers to " << to_string(id);
      } else if (entry->state == EntryState::kConfirmed && lives(id.owner, owner) &&
                 node->knows(id.owner, owner) &&
                 now_.at(id.owner)->knows(worker, node->incarnation())) {
        ADD_FAILURE() << "worker " << worker << " refers to " << to_string(id)
                      << ", and its owner knew it";
      }
    }
  }
}

void Program::died(const RRefId& id, WorkerId at, const std::string& why) {
  if (!strict()) return;
  EXPECT_TRUE(failed_.contains(id)) << to_string(id) << " at worker " << at << ": " << why;
  if (at != id.creator && id.creator != id.owner) {
    EXPECT_FALSE(begun_.contains(id)) << to_string(id) << " at worker " << at << ": " << why;
  }
}

void Program::run() {
  SCOPED_TRACE(concat("seed ", seed_));
  for (std::size_t worker = 0; worker < workers_; ++worker) start(static_cast<WorkerId>(worker));
  if (crashes_) {
    for (std::uint64_t i = 1 + random_.below(2); i > 0; --i) {
      world_.call_after(std::chrono::microseconds(random_.below(25'000)), [this] { crash(); });
    }
  }
  world_.call_after(60ms, [this] {
    over_ = true;
    for (const auto& [worker, node] : now_) node->drop_all();
  });
  std::uint64_t steps = 0;
  while (world_.step() && !testing::Test::HasFailure()) {
    ASSERT_LT(++steps, 1'000'000u) << "it goes on for ever: " << describe();
  }
  check();
}

std::string Program::describe() const {
  std::string text;
  for (const auto& [worker, node] : now_) {
    if (node->crashed) continue;
    for (const auto& [other, known] : now_) {
      if (!node->knows(other, known->incarnation())) {
        text += concat("\n  worker", worker, " does not know worker", other);
      }
    }
    for (const std::string& line : node->machine().unsettled()) {
      text += concat("\n  worker", worker, ": ", line);
    }
  }
  return text;
}

void Program::check() {
  if (testing::Test::HasFailure()) return;
  for (const auto& [worker, node] : now_) {
    if (node->crashed) continue;
    SCOPED_TRACE(concat("worker ", worker));
    EXPECT_EQ(node->machine().users(), 0u);
    EXPECT_EQ(node->machine().owned(), 0u);
    EXPECT_TRUE(node->machine().drained()) << describe();
    EXPECT_EQ(node->calls(), 0u);
    EXPECT_EQ(node->waits, 0) << "somebody waits for ever";
    EXPECT_TRUE(node->held().empty());
    EXPECT_EQ(alive_[node->incarnation()], 0) << "values that nobody can reach";
  }
}

}  // namespace

void run_programs(std::uint64_t first_seed, std::uint64_t count) {
  for (std::uint64_t seed = first_seed; seed < first_seed + count; ++seed) {
    Program(seed).run();
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace convoy::rref::test
