#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "rref/machine.h"

namespace convoy::rref::test {

// Machines, and letters between them that go when and how a test wants. Time is the test's.
class Net {
 public:
  struct Letter {
    WorkerId from = 0;
    WorkerId to = 0;
    std::string bytes;
  };

  explicit Net(std::size_t size);
  ~Net();

  Machine& operator[](std::size_t worker) { return *machines_[worker]; }
  Incarnation incarnation(std::size_t worker) const { return incarnations_[worker]; }
  // A new process under the same name; the old one is forgotten without a word. Nobody is told.
  void restart(std::size_t worker);
  void tell_met(std::size_t whom, std::size_t of);

  // Output and letters of all, until there are none that are due; letters go to `wire`.
  void pump();
  std::deque<Letter> wire;
  void deliver(const Letter& letter);
  // Whatever is on the wire, and what follows, also later, as long as something happens within a
  // minute.
  void settle();
  // Time passes; what is due then goes to the wire.
  void advance(std::chrono::nanoseconds time);

  // A value that counts those that live.
  Value value();
  int alive = 0;
  std::vector<std::pair<WorkerId, Incarnation>> watched;
  // Calls of machines that may still be answered, by (caller, callee, number).
  std::vector<std::array<std::uint64_t, 3>> under_way;

  // A value of `owner` that `creator` has created by a call that went well.
  Entry* created(std::size_t creator, std::size_t owner);
  // The reference goes from one to another by a call that is answered once all is confirmed.
  Entry* passed(Entry& entry, std::size_t from, std::size_t to);
  void drop(std::size_t worker, Entry* entry);

 private:
  std::unique_ptr<Machine> make(std::size_t worker, Incarnation incarnation);

  Time now_{std::chrono::hours(1)};
  std::vector<std::unique_ptr<Machine>> machines_;
  std::vector<std::unique_ptr<Machine>> old_;
  std::vector<Incarnation> incarnations_;
};

// How a callback was called.
struct Told {
  int times = 0;
  std::optional<Failure> failure;

  Callback callback() {
    return [this](const Failure* why) {
      ++times;
      if (why) failure = *why;
    };
  }
  ValueCallback value_callback() {
    return [this](const Value*, const Failure* why) {
      ++times;
      if (why) failure = *why;
    };
  }
  std::string text() const { return failure ? failure->text : ""; }
};

}  // namespace convoy::rref::test
