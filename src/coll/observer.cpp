#include "coll/observer.h"

#include <algorithm>
#include <array>

#include "base/call_scope.h"
#include "base/log.h"
#include "coll/medium.h"
#include "coll/mesh.h"
#include "coll/shared_memory.h"

namespace convoy::coll {
namespace {

constexpr std::size_t kOperations = static_cast<std::size_t>(OpKind::kAllToAllV) + 1;

// Names as the flight record wants them, made once.
struct Names {
  std::array<flight::OperationText::Packed, kOperations> operations;
  std::array<flight::TypeText::Packed, kDataTypes> types;
  flight::OperationText::Packed send = flight::OperationText::pack("send");
  flight::OperationText::Packed recv = flight::OperationText::pack("recv");

  Names() {
    for (std::size_t i = 0; i < operations.size(); ++i) {
      operations[i] = flight::OperationText::pack(to_string(static_cast<OpKind>(i)));
    }
    for (std::size_t i = 0; i < types.size(); ++i) {
      types[i] = flight::TypeText::pack(to_string(static_cast<DataType>(i)));
    }
  }
};
const Names kNames;

// Whose processes are known only on one host.
flight::GroupMember member(Medium& medium) {
  flight::GroupMember member{
      .name = medium.name(), .rank = medium.rank(), .size = medium.size(), .processes = {}};
  const auto mesh = mesh_of(medium);
  for (int r = 0; mesh && r < medium.size(); ++r) {
    member.processes.push_back(mesh->process(r).pid);
  }
  return member;
}

// Elements that go in and come out, told alike by all ranks where they are alike.
void count(const Call& call, std::uint64_t ranks, flight::Operation& operation) {
  const std::uint64_t one = call.signature.count;
  const std::uint64_t all = one * ranks;
  switch (call.signature.op) {
    case OpKind::kNone:
    case OpKind::kBarrier:
    case OpKind::kMonitoredBarrier: return;
    case OpKind::kAllReduce:
    case OpKind::kReduce:
    case OpKind::kBroadcast: operation.input = operation.output = one; return;
    case OpKind::kReduceScatter:
    case OpKind::kScatter:
      operation.input = all;
      operation.output = one;
      return;
    case OpKind::kAllGather:
    case OpKind::kGather:
      operation.input = one;
      operation.output = all;
      return;
    case OpKind::kAllToAll: operation.input = operation.output = all; return;
    case OpKind::kReduceScatterV:
    case OpKind::kAllGatherV:
    case OpKind::kGatherV:
    case OpKind::kScatterV:
    case OpKind::kAllToAllV:
      operation.input = call.input_bytes / call.element();
      operation.output = call.output_bytes / call.element();
      return;
  }
}

}  // namespace

Observer::Observer(Medium& medium)
    : name_(medium.name()),
      size_(static_cast<std::uint64_t>(medium.size())),
      recorder_(flight::Recorder::instance()),
      group_(recorder_.add_group(member(medium))) {}

Observer::~Observer() { recorder_.remove_group(group_); }

Observer::Seen Observer::begin(const Call& call, std::uint64_t number, Clock::time_point now,
                               Turn turn) noexcept {
  const OpKind op = call.signature.op;
  flight::Operation operation{.group = group_,
                              .number = number,
                              .name = kNames.operations[static_cast<std::size_t>(op)],
                              .type = kNames.types[static_cast<std::size_t>(call.signature.type)],
                              .bytes = call.bytes(),
                              .peer = has_root(op) ? static_cast<int>(call.signature.root) : -1};
  count(call, size_, operation);
  Seen seen{.operation = to_string(op),
            .number = number,
            .bytes = call.bytes(),
            .called = now,
            .where = current_call_site()};
  seen.ticket = recorder_.begin(operation, seen.where, now, turn == Turn::kNow);
  return seen;
}

Observer::Seen Observer::begin(const Transfer& transfer, Clock::time_point now) noexcept {
  const std::uint64_t number = messages_.fetch_add(1, std::memory_order_relaxed) + 1;
  const std::uint64_t elements = transfer.bytes / size_of(transfer.type);
  Seen seen{.operation = transfer.sends ? "send" : "recv",
            .number = number,
            .bytes = transfer.bytes,
            .called = now,
            .where = current_call_site()};
  seen.ticket = recorder_.begin({.group = group_,
                                 .number = number,
                                 .name = transfer.sends ? kNames.send : kNames.recv,
                                 .type = kNames.types[static_cast<std::size_t>(transfer.type)],
                                 .input = transfer.sends ? elements : 0,
                                 .output = transfer.sends ? 0 : elements,
                                 .bytes = transfer.bytes,
                                 .peer = transfer.peer,
                                 .message = true},
                                seen.where, now, true);
  return seen;
}

void Observer::start(const Seen& seen) noexcept { recorder_.start(seen.ticket, QuickClock::now()); }

void Observer::end(const Seen& seen, const std::exception_ptr& error) noexcept {
  // Not before its call, if the quick clock has just been corrected.
  end(seen, error, std::max(seen.called, QuickClock::now()));
}

void Observer::note(const Transfer& transfer) noexcept {
  const auto now = QuickClock::now();
  end(begin(transfer, now), nullptr, now);
}

void Observer::end(const Seen& seen, const std::exception_ptr& error,
                   Clock::time_point now) noexcept {
  recorder_.end(seen.ticket, error ? flight::State::kFailed : flight::State::kCompleted, now);
  if (listeners_->any()) [[unlikely]]
    tell(seen, error, now);
}

void Observer::tell(const Seen& seen, const std::exception_ptr& error,
                    Clock::time_point now) noexcept {
  try {
    listeners_->tell({.operation = std::string(seen.operation),
                      .group = name_,
                      .sequence = seen.number,
                      .bytes = seen.bytes,
                      .start = seen.called,
                      .end = now,
                      .error = error,
                      .where = seen.where});
  } catch (const std::exception& thrown) {  // no memory for the text
    log_warn("telling of an operation: ", thrown.what());
  }
}

}  // namespace convoy::coll
