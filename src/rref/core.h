#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "agent/companion.h"
#include "agent/peer.h"
#include "os/fork_guard.h"
#include "rref/machine.h"

namespace convoy::rref {

// A machine, its lock, and its agent: carries out what the machine wants, sends its letters, wakes
// it when it is time. References keep it; it does not keep the agent.
//
// Locks: `mutex_` is held for the machine only. Nothing is called under it, but for
// Agent::is_under_way().
class Core final : public agent::Companion, public std::enable_shared_from_this<Core> {
 public:
  explicit Core(agent::Agent& agent);

  // As long as one lives and is good, so does the agent.
  class Use {
   public:
    explicit Use(Core& core) : core_(core), good_(core.life_->enter()) {}
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ~Use() {
      if (good_) core_.life_->leave();
    }
    explicit operator bool() const { return good_; }
    agent::Agent& agent() const { return core_.agent_; }

   private:
    Core& core_;
    const bool good_;
  };

  // Calls function(Machine&) under the lock, and carries out what follows from it.
  template <class Function>
  decltype(auto) with(Function function) {
    require_home();
    const auto self = shared_from_this();
    const Use use(*this);
    Work work(*this, use);
    return function(work.machine());
  }

  // The same for a function that changes nothing.
  template <class Function>
  decltype(auto) look(Function function) {
    require_home();
    const std::scoped_lock lock(mutex_);
    return function(std::as_const(machine()));
  }

  // False in a forked child: the lock may be held there by a thread that is not, for ever.
  bool is_home() const noexcept { return home_.is_here(); }

  void met(WorkerId worker);
  void hear(const agent::Worker& from, std::span<const std::byte> bytes);
  DebugInfo debug_info();
  std::vector<std::string> holders();
  // Memory of entries that are returned with a handle for the caller.
  Entry* adopt(Entry* entry);

  // NOLINTNEXTLINE(bugprone-exception-escape): see there
  void gone(const agent::Worker& worker, const std::string& why) noexcept override;
  bool idle() override;
  std::uint64_t activity() override;
  std::vector<std::string> under_way() override;
  void finish() override;
  void closed() noexcept override;  // NOLINT(bugprone-exception-escape): see there

 private:
  // Under the lock while it lives; then carries out.
  class Work {
   public:
    Work(Core& core, const Use& use);
    Work(const Work&) = delete;
    Work& operator=(const Work&) = delete;
    ~Work();  // NOLINT(bugprone-exception-escape): see there
    Machine& machine() { return core_.machine(); }

   private:
    Core& core_;
    const Use& use_;
    std::unique_lock<std::mutex> lock_;
  };

  // kUnsupported in a forked child.
  void require_home() const;
  Machine& machine();
  Incarnation incarnation_of(WorkerId worker) const;
  // NOLINTNEXTLINE(bugprone-exception-escape): see there
  void carry_out(Output&& output, const Use& use) noexcept;
  void watch(WorkerId worker, Incarnation incarnation, const Use& use);
  void flush(const Use& use) noexcept;  // NOLINT(bugprone-exception-escape): see there
  void arm(Time when, const Use& use) noexcept;
  // NOLINTNEXTLINE(bugprone-exception-escape): see there
  void timer_ran(std::uint64_t number) noexcept;

  const HomeProcess home_;
  agent::Agent& agent_;
  const std::shared_ptr<agent::AgentLife> life_;
  const std::string name_;

  std::mutex mutex_;
  std::unique_ptr<Machine> machine_;  // from the first met() on
  bool finishing_ = false;
  bool closed_ = false;
  // When the timer runs, and which one it is; guarded by mutex_.
  Time armed_ = Time::max();
  std::uint64_t timer_ = 0;

  std::atomic<int> flushes_{0};  // asked for, and not done yet
};

}  // namespace convoy::rref
