#include "net.h"

#include <algorithm>

#include "base/concat.h"

namespace convoy::rref::test {

using namespace std::chrono_literals;

Net::Net(std::size_t size) {
  for (std::size_t worker = 0; worker < size; ++worker) {
    incarnations_.push_back(1000 + worker);
    machines_.push_back(make(worker, incarnations_[worker]));
  }
  for (std::size_t worker = 0; worker < size; ++worker) {
    for (std::size_t other = 0; other < size; ++other) {
      if (other != worker) tell_met(worker, other);
    }
  }
}

Net::~Net() {
  for (auto* const all : {&machines_, &old_}) {
    for (const auto& machine : *all) {
      machine->close({ErrorKind::kCancelled, "the test is over", "", ""});
      for (auto& call : machine->output().calls) call();
    }
  }
}

std::unique_ptr<Machine> Net::make(std::size_t worker, Incarnation incarnation) {
  MachineOptions options{.self = static_cast<WorkerId>(worker),
                         .incarnation = incarnation,
                         .name = concat("worker", worker)};
  options.under_way = [this, worker](WorkerId callee, std::uint64_t number) {
    const std::array<std::uint64_t, 3> call{worker, callee, number};
    return std::find(under_way.begin(), under_way.end(), call) != under_way.end();
  };
  auto machine = std::make_unique<Machine>(options);
  machine->at(now_);
  return machine;
}

void Net::restart(std::size_t worker) {
  incarnations_[worker] += 1000;
  old_.push_back(std::move(machines_[worker]));
  machines_[worker] = make(worker, incarnations_[worker]);
}

void Net::tell_met(std::size_t whom, std::size_t of) {
  machines_[whom]->met(static_cast<WorkerId>(of), incarnations_[of], concat("worker", of));
}

void Net::pump() {
  for (std::size_t worker = 0; worker < machines_.size(); ++worker) {
    Machine& machine = *machines_[worker];
    machine.at(now_);
    for (Output output = machine.output(); !output.empty(); output = machine.output()) {
      for (auto& call : output.calls) call();
      watched.insert(watched.end(), output.watch.begin(), output.watch.end());
    }
    machine.collect([&](WorkerId to, std::string&& bytes) {
      wire.push_back({static_cast<WorkerId>(worker), to, std::move(bytes)});
    });
  }
}

void Net::deliver(const Letter& letter) {
  machines_[letter.to]->at(now_);
  machines_[letter.to]->hear(letter.from, std::as_bytes(std::span(letter.bytes)));
  pump();
}

void Net::advance(std::chrono::nanoseconds time) {
  now_ += time;
  pump();
}

void Net::settle() {
  const Time until = now_ + 60s;
  for (int rounds = 0;; ++rounds) {
    ASSERT_LT(rounds, 100'000) << "it goes on for ever";
    pump();
    while (!wire.empty()) {
      const Letter letter = std::move(wire.front());
      wire.pop_front();
      deliver(letter);
    }
    Time next = Time::max();
    for (const auto& machine : machines_) next = std::min(next, machine->next());
    if (next > until) return;
    now_ = std::max(now_, next);
  }
}

Value Net::value() {
  ++alive;
  return {std::shared_ptr<void>(this, [this](void*) { --alive; }), 7};
}

Entry* Net::created(std::size_t creator, std::size_t owner) {
  Entry* const user = machines_[creator]->create(static_cast<WorkerId>(owner));
  Entry* const made =
      machines_[owner]->begin(static_cast<WorkerId>(creator), {user->id, user->fork});
  machines_[owner]->set_value(*made, value());
  drop(owner, made);
  machines_[creator]->creation_ended(*user, nullptr);
  pump();
  return user;
}

Entry* Net::passed(Entry& entry, std::size_t from, std::size_t to) {
  const auto receiver = static_cast<WorkerId>(to);
  const Passed passage = machines_[from]->pass(entry, receiver, std::nullopt);
  Entry* const taken = machines_[to]->take(static_cast<WorkerId>(from), passage);
  settle();
  machines_[from]->passed(receiver, passage, Passage::kDelivered);
  pump();
  return taken;
}

void Net::drop(std::size_t worker, Entry* entry) {
  machines_[worker]->drop(*entry);
  pump();
}

}  // namespace convoy::rref::test
