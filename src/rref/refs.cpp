#include "rref/refs.h"

#include <atomic>

#include "base/error.h"
#include "convoy/rpc_error.h"
#include "rref/core.h"

namespace convoy::rref {

// --- Ref ---

Ref::Ref(const Ref& other) noexcept : entry_(other.entry_) {
  if (entry_) entry_->handles.fetch_add(1, std::memory_order_relaxed);
}

// NOLINTNEXTLINE(bugprone-exception-escape): there is a machine; without memory nothing goes on
Ref::~Ref() {
  if (!entry_) return;
  std::uint32_t handles = entry_->handles.load(std::memory_order_relaxed);
  while (handles > 1) {
    if (entry_->handles.compare_exchange_weak(handles, handles - 1, std::memory_order_release,
                                              std::memory_order_relaxed)) {
      return;
    }
  }
  // The last one goes under the lock: others may find the entry there.
  const std::shared_ptr<Core> core = entry_->core;
  if (!core->is_home()) return;  // it is the parent's: a forked child leaves its copy alone
  core->with([&](Machine& machine) { machine.drop(*entry_); });
}

const RRefId& Ref::id() const noexcept { return entry_->id; }
bool Ref::is_owner() const noexcept { return entry_->is_owner; }
std::uint64_t Ref::fork() const noexcept { return entry_->fork; }

bool Ref::confirmed() const {
  return entry_->core->look([&](const Machine&) {
    return entry_->state != EntryState::kExpected && entry_->state != EntryState::kCreating &&
           entry_->state != EntryState::kRequested && entry_->state != EntryState::kDead;
  });
}

std::optional<Failure> Ref::failure() const {
  return entry_->core->look([&](const Machine& machine) { return machine.failure(*entry_); });
}

void Ref::when_confirmed(Callback callback) const {
  entry_->core->with(
      [&](Machine& machine) { machine.when_confirmed(*entry_, std::move(callback)); });
}

void Ref::when_lost(Callback callback) const {
  entry_->core->with([&](Machine& machine) { machine.when_lost(*entry_, std::move(callback)); });
}

// --- Refs ---

Refs::Refs(agent::Agent& agent) : core_(std::make_shared<Core>(agent)) {
  agent.accompany(core_);
  agent.on_letter(kReferenceLetter,
                  [core = core_](const agent::Worker& from, std::span<const std::byte> body,
                                 std::vector<agent::Part>&&) { core->hear(from, body); });
}

Refs::~Refs() { close(); }

void Refs::met(WorkerId worker) { core_->met(worker); }

Ref Refs::make(Value value) {
  return {
      core_->with([&](Machine& machine) { return core_->adopt(machine.make(std::move(value))); }),
      Ref::Adopt()};
}

Refs::Creation Refs::create(WorkerId owner) {
  Entry* const entry =
      core_->with([&](Machine& machine) { return core_->adopt(machine.create(owner)); });
  return {Ref(entry, Ref::Adopt()), {entry->id, entry->fork}};
}

void Refs::creation_ended(const Ref& ref, const Failure* failure) {
  core_->with([&](Machine& machine) { machine.creation_ended(*ref.entry_, failure); });
}

Ref Refs::begin(WorkerId from, const CreationHead& head) {
  return {core_->with([&](Machine& machine) { return core_->adopt(machine.begin(from, head)); }),
          Ref::Adopt()};
}

void Refs::set_value(const Ref& ref, Value value) {
  core_->with([&](Machine& machine) { machine.set_value(*ref.entry_, std::move(value)); });
}

void Refs::set_failure(const Ref& ref, const Failure& failure) {
  core_->with([&](Machine& machine) { machine.set_failure(*ref.entry_, failure); });
}

void Refs::when_value(const Ref& ref, ValueCallback callback) {
  core_->with([&](Machine& machine) { machine.when_value(*ref.entry_, std::move(callback)); });
}

void Refs::when_value(WorkerId from, const RRefId& id, ValueCallback callback) {
  core_->with([&](Machine& machine) { machine.when_value(from, id, std::move(callback)); });
}

Value Refs::ready_value(const RRefId& id) {
  return core_->look([&](const Machine& machine) { return machine.ready_value(id); });
}

Value Refs::value(const Ref& ref, const Deadline& deadline) {
  struct State {
    std::atomic<bool> done{false};
    Value value;
    std::optional<Failure> failure;
  };
  const auto state = std::make_shared<State>();
  const Core::Use use(*core_);
  when_value(ref, [state, core = core_](const Value* value, const Failure* failure) {
    if (value) state->value = *value;
    if (failure) state->failure = *failure;
    state->done.store(true, std::memory_order_release);
    const Core::Use agent(*core);
    if (agent) agent.agent().wake();
  });
  const auto done = [&] { return state->done.load(std::memory_order_acquire); };
  if (!done() && (!use || !use.agent().wait(deadline, done))) {
    fail(ErrorKind::kTimeout, "RRef ", to_string(ref.id()), ": its value was not there in time");
  }
  if (state->failure) {
    throw rpc::RemoteError(state->failure->kind, state->failure->text, state->failure->worker,
                           state->failure->remote_type);
  }
  return std::move(state->value);
}

Passed Refs::pass(const Ref& ref, WorkerId to, std::optional<std::uint64_t> answer_to) {
  return core_->with([&](Machine& machine) { return machine.pass(*ref.entry_, to, answer_to); });
}

// NOLINTNEXTLINE(bugprone-exception-escape): there is a machine; without memory nothing goes on
void Refs::passed(WorkerId to, std::span<const Passed> references, Passage how) noexcept {
  if (references.empty() || !core_->is_home()) return;
  core_->with([&](Machine& machine) {
    for (const Passed& each : references) machine.passed(to, each, how);
  });
}

Ref Refs::take(WorkerId from, const Passed& passed) {
  return {core_->with([&](Machine& machine) { return core_->adopt(machine.take(from, passed)); }),
          Ref::Adopt()};
}

void Refs::when_settled(std::span<const Ref> refs, Callback callback) {
  struct State {
    std::atomic<std::size_t> left;
    std::atomic<bool> failed{false};
    Callback callback;
  };
  if (refs.empty()) return callback(nullptr);
  const auto state = std::make_shared<State>();
  state->left = refs.size();
  state->callback = std::move(callback);
  core_->with([&](Machine& machine) {
    for (const Ref& ref : refs) {
      machine.when_settled(*ref.entry_, [state](const Failure* failure) {
        const bool last = state->left.fetch_sub(1) == 1;
        if (failure ? !state->failed.exchange(true) : last && !state->failed.load()) {
          state->callback(failure);
        }
      });
    }
  });
}

void Refs::close() noexcept { core_->closed(); }

std::vector<std::string> Refs::leaks() const { return core_->holders(); }

DebugInfo Refs::debug_info() const { return core_->debug_info(); }

}  // namespace convoy::rref
