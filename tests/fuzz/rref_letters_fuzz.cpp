// What a worker of the same session may do to another by letters about references, and by
// references in calls, in any order. Nonsense is refused with an error, and loses that worker;
// whatever it did, nothing stays when it is gone, and whoever waited hears so once.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "convoy/error.h"
#include "rref/machine.h"
#include "rref/records.h"

namespace {

using namespace convoy;
using namespace convoy::rref;

void require(bool condition) {
  if (!condition) std::abort();
}

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : left_(data, size) {}
  bool empty() const { return left_.empty(); }
  std::uint64_t byte() {
    if (left_.empty()) return 0;
    const std::uint8_t value = left_[0];
    left_ = left_.subspan(1);
    return value;
  }
  std::span<const std::byte> bytes(std::size_t count) {
    count = std::min(count, left_.size());
    const auto taken = std::as_bytes(left_.first(count));
    left_ = left_.subspan(count);
    return taken;
  }

 private:
  std::span<const std::uint8_t> left_;
};

constexpr WorkerId kAttacker = 0;
constexpr WorkerId kVictim = 1;
constexpr WorkerId kHonest = 2;
constexpr Incarnation incarnation_of(WorkerId worker) { return 100 + worker; }

class Scene {
 public:
  Scene() {
    for (Machine* const machine : {&victim_, &honest_}) {
      machine->at(now_);
      for (const WorkerId worker : {kAttacker, kVictim, kHonest}) {
        machine->met(worker, incarnation_of(worker), "");
      }
    }
  }

  void step(Input& input) {
    switch (input.byte() % 14) {
      case 0: return hear(input.bytes(input.byte()));
      case 1: return hear_records(input);
      case 2: return attempt([&] { keep(victim_.take(kAttacker, passed_of(input))); });
      case 3:
        return attempt([&] {
          keep(victim_.begin(kAttacker, {id_of(input), input.byte()}));
          running_.push_back(handles_.back());
        });
      case 4:
        return attempt([&] {
          victim_.when_value(kAttacker, id_of(input), waiting());
          ++waiting_;
        });
      case 5: return create(input);
      case 6:
        if (!creations_.empty()) end_creation(input.byte() % 2 == 0);
        return;
      case 7: return attempt([&] { keep(victim_.make(value())); });
      case 8: return pass(input);
      case 9:
        if (!passages_.empty()) end_passage(static_cast<Passage>(input.byte() % 3));
        return;
      case 10:
        if (!handles_.empty()) drop(input.byte() % handles_.size());
        return;
      case 11:
        if (!running_.empty()) finish_function(input.byte() % 2 == 0);
        return;
      case 12: now_ += std::chrono::milliseconds(input.byte() * 20); return pump();
      default: return pump();
    }
  }

  void end() {
    pump();
    while (!running_.empty()) finish_function(false);
    while (!creations_.empty()) end_creation(false);
    while (!passages_.empty()) end_passage(Passage::kUnknown);
    lose_attacker();
    pump();
    victim_.lost(kHonest, incarnation_of(kHonest), "killed");
    pump();
    for (const auto& [entry, told] : asked_) {
      require(*told);
      require(entry->is_owner || victim_.failure(*entry));
    }
    while (!handles_.empty()) drop(0);
    while (!honest_handles_.empty()) {
      honest_.drop(*honest_handles_.back());
      honest_handles_.pop_back();
    }
    require(victim_.owned() == 0 && victim_.users() == 0 && victim_.drained());
    require(waiting_ == 0);
    honest_.lost(kVictim, incarnation_of(kVictim), "killed");
    honest_.close({ErrorKind::kCancelled, "over", "", ""});
    victim_.close({ErrorKind::kCancelled, "over", "", ""});
    pump();
    require(alive_ == 0);
  }

 private:
  // What it may throw; nothing has happened then.
  template <class Function>
  void attempt(Function function) {
    try {
      function();
    } catch (const Error& error) {
      require(error.kind() != ErrorKind::kInternal);
    }
    pump();
  }

  void hear(std::span<const std::byte> letter) {
    if (lost_) return;
    try {
      victim_.hear(kAttacker, letter);
    } catch (const Error& error) {
      require(error.kind() == ErrorKind::kInvalidArgument);
      lose_attacker();
    }
    pump();
  }
  void lose_attacker() {
    if (std::exchange(lost_, true)) return;
    victim_.lost(kAttacker, incarnation_of(kAttacker), "it sends nonsense");
    honest_.lost(kAttacker, incarnation_of(kAttacker), "it sends nonsense");
  }

  RRefId id_of(Input& input) const {
    const std::uint64_t how = input.byte();
    RRefId id{.owner = static_cast<WorkerId>(how % 4),
              .creator = static_cast<WorkerId>(how / 4 % 4)};
    id.incarnation = incarnation_of(id.creator) + (how / 16 % 8 == 0 ? 1 : 0);
    id.number = input.byte();
    return id;
  }
  Passed passed_of(Input& input) const {
    Passed passed{.id = id_of(input)};
    const std::uint64_t how = input.byte();
    passed.owner_incarnation = incarnation_of(passed.id.owner) + (how % 8 == 0 ? 1 : 0);
    passed.fork = how / 8 % 2 == 0 ? 0 : (std::uint64_t{1} << 63) | input.byte();
    passed.passage = input.byte() | (how / 16 % 2 == 0 ? 0 : Passed::kReply);
    return passed;
  }
  void hear_records(Input& input) {
    LetterHead head{.from = incarnation_of(kAttacker),
                    .to = incarnation_of(kVictim),
                    .taken = input.byte() % 4 == 0 ? 0 : heard_,
                    .first = next_};
    std::string records;
    const std::uint64_t count = 1 + input.byte() % 8;
    for (; head.count < count && !input.empty(); ++head.count) {
      Record record{.type = static_cast<RecordType>(1 + input.byte() % 8)};
      record.id = id_of(input);
      const std::uint64_t number = input.byte();
      record.number = number < 250 ? number : ~number;
      record.call = input.byte() % 4;
      record.failure = {ErrorKind::kRemote, "no", "attacker", ""};
      records += encode_record(record);
    }
    next_ += head.count;
    std::string letter(reinterpret_cast<const char*>(&head), sizeof head);
    letter += records;
    hear(std::as_bytes(std::span(letter)));
  }

  void create(Input& input) {
    attempt([&] {
      const WorkerId owner = static_cast<WorkerId>(input.byte() % 3);
      Entry* const entry = victim_.create(owner);
      keep(entry);
      creations_.push_back(entry);
      if (owner == kVictim) {
        keep(victim_.begin(kVictim, {entry->id, entry->fork}));
        running_.push_back(handles_.back());
      } else if (owner == kHonest) {
        Entry* const made = honest_.begin(kVictim, {entry->id, entry->fork});
        honest_.set_value(*made, value());
        honest_.drop(*made);
      }
    });
  }
  void end_creation(bool good) {
    const Failure failure{ErrorKind::kTimeout, "too late", "victim", ""};
    Entry* const entry = creations_.front();
    creations_.pop_front();
    if (entry->id.owner == kAttacker && lost_) good = false;  // nobody has answered
    victim_.creation_ended(*entry, good ? nullptr : &failure);
    pump();
  }
  void pass(Input& input) {
    if (handles_.empty()) return;
    Entry& entry = *handles_[input.byte() % handles_.size()];
    const std::uint64_t how = input.byte();
    const WorkerId to = how % 2 == 0 ? kAttacker : kHonest;
    if (to == kAttacker && lost_) return;
    attempt([&] {
      const bool answer = how / 2 % 2 == 0;
      const Passed passed =
          victim_.pass(entry, to, answer ? std::optional<std::uint64_t>(7) : std::nullopt);
      if (!answer) passages_.push_back({to, passed});
      if (to == kHonest) honest_handles_.push_back(honest_.take(kVictim, passed));
    });
  }
  void end_passage(Passage how) {
    const auto [to, passed] = passages_.front();
    passages_.pop_front();
    // What was not sent was not taken.
    if (how == Passage::kNotSent && to == kHonest) how = Passage::kDelivered;
    victim_.passed(to, passed, how);
    pump();
  }
  void finish_function(bool good) {
    Entry* const entry = running_.front();
    running_.pop_front();
    if (good) {
      victim_.set_value(*entry, value());
    } else {
      victim_.set_failure(*entry, {ErrorKind::kRemote, "no", "victim", ""});
    }
    pump();
  }

  // And wants to know when the owner knows of it.
  void keep(Entry* entry) {
    handles_.push_back(entry);
    if (asked_.contains(entry)) return;
    const auto told = asked_[entry] = std::make_shared<bool>(false);
    victim_.when_confirmed(*entry,
                           [told](const Failure*) { require(!std::exchange(*told, true)); });
  }
  void drop(std::size_t which) {
    Entry* const entry = handles_[which];
    handles_.erase(handles_.begin() + static_cast<std::ptrdiff_t>(which));
    const bool last = std::find(handles_.begin(), handles_.end(), entry) == handles_.end();
    if (last) {
      std::erase(running_, entry);
      asked_.erase(entry);
    }
    victim_.drop(*entry);
    pump();
  }
  Value value() {
    ++alive_;
    return {std::shared_ptr<void>(this, [this](void*) { --alive_; }), 7};
  }
  ValueCallback waiting() {
    return [this](const Value* value, const Failure* failure) {
      require((value == nullptr) != (failure == nullptr));
      require(waiting_ > 0);
      --waiting_;
    };
  }

  // Until nothing is due.
  void pump() {
    for (bool more = true; more;) {
      more = false;
      for (Machine* const machine : {&victim_, &honest_}) {
        machine->at(now_);
        Output output = machine->output();
        more = more || !output.empty();
        for (auto& call : output.calls) call();
        for (const auto& [worker, incarnation] : output.watch) {
          if (incarnation != incarnation_of(worker) || worker > kHonest) {
            machine->lost(worker, incarnation, "it is not a worker of this session");
          }
        }
        const WorkerId self = machine == &victim_ ? kVictim : kHonest;
        machine->collect([&](WorkerId to, std::string&& letter) {
          if (to == kVictim || to == kHonest) {
            letters_.push_back({self, std::move(letter)});
          } else if (to == kAttacker && self == kVictim) {
            const auto head = decode_letter(std::as_bytes(std::span(letter))).head;
            if (head.count != 0) heard_ = std::max(heard_, head.first + head.count - 1);
          }
        });
        require(machine->next() > now_);
      }
      while (!letters_.empty()) {
        const auto [from, letter] = std::move(letters_.front());
        letters_.pop_front();
        more = true;
        (from == kVictim ? honest_ : victim_).hear(from, std::as_bytes(std::span(letter)));
      }
    }
  }

  Time now_{std::chrono::hours(1)};
  int alive_ = 0;
  int waiting_ = 0;
  bool lost_ = false;
  std::uint64_t next_ = 1;   // record of the attacker's
  std::uint64_t heard_ = 0;  // records that came to it
  std::deque<std::pair<WorkerId, std::string>> letters_;
  std::vector<Entry*> handles_;
  std::map<Entry*, std::shared_ptr<bool>> asked_;
  std::vector<Entry*> honest_handles_;
  std::deque<Entry*> creations_;
  std::deque<Entry*> running_;
  std::deque<std::pair<WorkerId, Passed>> passages_;
  Machine victim_{{.self = kVictim,
                   .incarnation = incarnation_of(kVictim),
                   .name = "victim",
                   .under_way = [](WorkerId, std::uint64_t call) { return call == 3; }}};
  Machine honest_{{.self = kHonest, .incarnation = incarnation_of(kHonest), .name = "honest"}};
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  Scene scene;
  while (!input.empty()) scene.step(input);
  scene.end();
  return 0;
}
