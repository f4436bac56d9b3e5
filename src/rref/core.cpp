#include "rref/core.h"

#include <cstring>

#include "base/error.h"
#include "base/log.h"

namespace convoy::rref {
namespace {

Incarnation to_incarnation(const Id& id) {
  static_assert(sizeof id.bytes >= sizeof(Incarnation));
  Incarnation number = 0;
  std::memcpy(&number, id.bytes.data(), sizeof number);
  return number | 1;  // not 0
}

}  // namespace

Core::Core(agent::Agent& agent) : agent_(agent), life_(agent.life()), name_(agent.name()) {}

Incarnation Core::incarnation_of(WorkerId worker) const {
  return to_incarnation(agent_.address_of(worker).id);
}

// --- under the lock, and after it ---

Core::Work::Work(Core& core, const Use& use) : core_(core), use_(use), lock_(core.mutex_) {
  if (core_.machine_ && use_) core_.machine_->at(core_.agent_.now());
}

void Core::require_home() const {
  if (is_home()) [[likely]]
    return;
  fail(ErrorKind::kUnsupported, name_,
       ": references cannot be used in a forked child of the process that has them");
}

Machine& Core::machine() {
  if (!machine_) {
    fail(ErrorKind::kInvalidArgument, "references: this worker has not met the others yet");
  }
  return *machine_;
}

// NOLINTNEXTLINE(bugprone-exception-escape): there is a machine; without memory nothing goes on
Core::Work::~Work() {
  if (!core_.machine_) return;
  Machine& machine = *core_.machine_;
  Output output = machine.output();
  const Time next = use_ ? machine.next() : Time::max();
  const bool due = next != Time::max() && next <= core_.agent_.now();
  const bool later = !due && next < core_.armed_;
  lock_.unlock();
  if (due) core_.flush(use_);
  if (later) core_.arm(next, use_);
  if (!output.empty()) core_.carry_out(std::move(output), use_);
}

// Nothing of this throws: callbacks must not, and what cannot be sent now is sent again.
// NOLINTNEXTLINE(bugprone-exception-escape): there is a machine; without memory nothing goes on
void Core::carry_out(Output&& output, const Use& use) noexcept {
  for (auto& call : output.calls) call();
  std::erase_if(output.values, [](const Value& value) { return !value.object; });
  if (!output.values.empty() && use && agent_.in_own_thread()) {
    // What their destructors do may take long: not on the thread that serves.
    try {
      agent_.post([values = std::make_shared<std::vector<Value>>(std::move(output.values))] {});
    } catch (const std::exception&) {
      // They go here.
    }
  }
  for (const auto& [worker, incarnation] : output.watch) watch(worker, incarnation, use);
}

void Core::watch(WorkerId worker, Incarnation incarnation, const Use& use) {
  if (!use || worker >= agent_.workers().size()) return;  // it is told when it joins
  if (incarnation_of(worker) == incarnation) return agent_.watch(worker);
  with([&](Machine& machine) {
    machine.lost(worker, incarnation, "it is not a worker of this session");
  });
}

// One thread at a time sends, so that letters leave in order; it does the work of others who come.
// NOLINTNEXTLINE(bugprone-exception-escape): there is a machine; without memory nothing goes on
void Core::flush(const Use& use) noexcept {
  if (!use || flushes_.fetch_add(1) != 0) return;
  for (int asked = 1; asked != 0;) {
    asked = flushes_.load();
    std::vector<std::pair<WorkerId, std::string>> letters;
    Time next = Time::max();
    Output output;
    {
      const std::scoped_lock lock(mutex_);
      machine_->at(agent_.now());
      machine_->collect(
          [&](WorkerId to, std::string&& letter) { letters.emplace_back(to, std::move(letter)); });
      output = machine_->output();
      next = machine_->next();
    }
    for (const auto& [to, letter] : letters) {
      try {
        agent_.send_letter(to, kReferenceLetter, {.body = std::as_bytes(std::span(letter))});
      } catch (const std::exception& error) {
        log_warn("rpc, ", name_, ": worker ", to, " is told of references later: ", error.what());
      }
    }
    if (!output.empty()) carry_out(std::move(output), use);
    arm(next, use);
    asked = flushes_.fetch_sub(asked) - asked;
  }
}

void Core::arm(Time when, const Use& use) noexcept {
  if (!use || when == Time::max()) return;
  std::uint64_t number = 0;
  {
    const std::scoped_lock lock(mutex_);
    if (when >= armed_ || closed_) return;
    armed_ = when;
    number = ++timer_;
  }
  try {
    agent_.call_at(when, [self = shared_from_this(), number] { self->timer_ran(number); });
  } catch (const std::exception& error) {
    log_warn("rpc, ", name_, ": no timer for references: ", error.what());
    const std::scoped_lock lock(mutex_);
    armed_ = Time::max();
  }
}

// NOLINTNEXTLINE(bugprone-exception-escape): there is a machine; without memory nothing goes on
void Core::timer_ran(std::uint64_t number) noexcept {
  const Use use(*this);
  if (!use) return;
  {
    const std::scoped_lock lock(mutex_);
    if (number != timer_) return;  // an earlier one was wanted later
    armed_ = Time::max();
  }
  flush(use);
}

// --- others ---

void Core::met(WorkerId worker) {
  {
    const std::scoped_lock lock(mutex_);
    if (!machine_) {
      MachineOptions options;
      options.self = agent_.self().id;
      options.name = name_;
      options.incarnation = incarnation_of(options.self);
      options.under_way = [this](WorkerId to, std::uint64_t number) {
        return agent_.is_under_way(to, number);
      };
      machine_ = std::make_unique<Machine>(options);
    }
  }
  const agent::Worker& who = agent_.worker(static_cast<std::int64_t>(worker));
  with([&](Machine& machine) {
    if (worker != agent_.self().id) machine.met(worker, incarnation_of(worker), who.name);
  });
  // Before it was met: nobody tells us again.
  if (agent_.is_lost(worker)) gone(who, "it is gone");
}

// NOLINTNEXTLINE(bugprone-exception-escape): there is a machine; without memory nothing goes on
void Core::gone(const agent::Worker& worker, const std::string& why) noexcept {
  {
    const std::scoped_lock lock(mutex_);
    if (!machine_) return;  // met() finds out
  }
  with([&](Machine& machine) { machine.lost(worker.id, incarnation_of(worker.id), why); });
  agent_.look_if_idle();
}

void Core::hear(const agent::Worker& from, std::span<const std::byte> bytes) {
  {
    const std::scoped_lock lock(mutex_);
    if (!machine_) return;  // it comes again
  }
  with([&](Machine& machine) { machine.hear(from.id, bytes); });
  agent_.look_if_idle();
}

Entry* Core::adopt(Entry* entry) {
  if (!entry->core) entry->core = shared_from_this();
  return entry;
}

// --- the end ---

bool Core::idle() {
  const std::scoped_lock lock(mutex_);
  if (!machine_) return true;
  return finishing_ ? machine_->drained() : machine_->settled();
}

std::uint64_t Core::activity() {
  const std::scoped_lock lock(mutex_);
  return machine_ ? machine_->activity() : 0;
}

std::vector<std::string> Core::under_way() {
  const std::scoped_lock lock(mutex_);
  if (!machine_) return {};
  auto lines = machine_->unsettled();
  for (std::string& line : machine_->holders()) lines.push_back(std::move(line));
  return lines;
}

void Core::finish() {
  {
    const std::scoped_lock lock(mutex_);
    if (!machine_) return;
    finishing_ = true;
  }
  with([&](Machine& machine) {
    machine.end_users({ErrorKind::kInvalidArgument, "the session was shut down", name_, {}});
  });
}

// NOLINTNEXTLINE(bugprone-exception-escape): there is a machine; without memory nothing goes on
void Core::closed() noexcept {
  {
    const std::scoped_lock lock(mutex_);
    if (std::exchange(closed_, true) || !machine_) return;
  }
  // The agent may be gone.
  with([&](Machine& machine) {
    machine.close({ErrorKind::kInvalidArgument, "the session was shut down", name_, {}});
  });
}

DebugInfo Core::debug_info() {
  require_home();
  const std::scoped_lock lock(mutex_);
  return machine_ ? machine_->debug_info() : DebugInfo{};
}

std::vector<std::string> Core::holders() {
  require_home();
  const std::scoped_lock lock(mutex_);
  return machine_ ? machine_->holders() : std::vector<std::string>{};
}

}  // namespace convoy::rref
