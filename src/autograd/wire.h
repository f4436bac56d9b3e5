#pragma once

#include <ATen/core/Tensor.h>

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "convoy/autograd.h"
#include "convoy/error.h"
#include "convoy/fields.h"

// What workers tell each other about backward passes: arguments and results of calls. Every one may
// come twice, or late.
namespace convoy::autograd::detail {

using WorkerId = std::uint32_t;

// A pass: who is its root, and which of that one's.
struct PassId {
  WorkerId root = 0;
  std::uint64_t number = 0;
  CONVOY_FIELDS(root, number)

  friend auto operator<=>(const PassId&, const PassId&) = default;
};

// What each message of a pass begins with.
struct PassHead {
  PassId pass;
  std::uint64_t floor = 0;  // older passes of that root have ended
  ContextId context = 0;
  bool fast = false;
  bool retain = false;
  bool deterministic = false;
  bool planned = false;                 // the root knows who takes part: nobody is asked
  std::uint64_t remaining = 0;          // nanoseconds until its deadline; kNoLimit
  std::vector<StepId> optimizers = {};  // that step at the end of each part
  CONVOY_FIELDS(pass, floor, context, fast, retain, deterministic, planned, remaining, optimizers)
};
inline constexpr std::uint64_t kNoLimit = UINT64_MAX;

// Tensors of a message that gradients will come for.
struct Ports {
  WorkerId sender = 0;  // who sent the message when it was recorded
  std::uint64_t message = 0;
  std::vector<std::uint32_t> tensors;
  CONVOY_FIELDS(sender, message, tensors)
};

// The same by the bits of their numbers.
struct PlannedSend {
  std::uint64_t message = 0;
  std::uint32_t tensors = 0;
  CONVOY_FIELDS(message, tensors)
};
// What a worker does in a pass whose root knows it without asking.
struct PlanPart {
  std::vector<PlannedSend> sends;
  std::uint32_t ports = 0;  // tensors of messages that it got, which these lead to
  CONVOY_FIELDS(sends, ports)

  bool from_root = false;  // gradients come to it from the root, too; not sent
};

// How a pass went on one worker.
struct PassError {
  std::int32_t kind = static_cast<std::int32_t>(ErrorKind::kRemote);
  WorkerId worker = 0;
  std::string type;  // of what was thrown
  std::string text;
  CONVOY_FIELDS(kind, worker, type, text)
};

// The gradients of a message's tensors.
struct MessageGradients {
  std::uint64_t message = 0;
  std::vector<at::Tensor> gradients;
  CONVOY_FIELDS(message, gradients)
};
// What a worker has for the root when it is about to wait, or done.
struct GradientReply {
  std::vector<MessageGradients> back;
  bool done = false;
  std::vector<WorkerId> engaged;
  CONVOY_FIELDS(back, done, engaged)
};

// Of a pass with optimizers, on one worker.
enum class Stepped : std::uint8_t {
  kNothing,  // it has not come to it, or has none of the parameters
  kIsBeing,  // just now
  kStepped,
};
struct AbortReply {
  std::string waits_for;          // empty: for nothing
  std::vector<WorkerId> engaged;  // to whom it has sent gradients
  Stepped stepped = Stepped::kNothing;
  CONVOY_FIELDS(waits_for, engaged, stepped)
};

// A context on one worker, for dump().
struct MessageReport {
  std::uint64_t message = 0;
  WorkerId peer = 0;
  std::string function;
  bool reply = false;
  std::uint32_t tensors = 0;
  std::vector<std::string> nodes;  // of a send: what its gradients go to
  CONVOY_FIELDS(message, peer, function, reply, tensors, nodes)
};
struct PassReport {
  PassId pass;
  std::string state;
  std::vector<std::uint64_t> active;   // sends
  std::vector<std::uint64_t> missing;  // those of them whose gradients have not come
  CONVOY_FIELDS(pass, state, active, missing)
};
struct ContextReport {
  bool there = false;
  WorkerId worker = 0;
  std::vector<MessageReport> sends;
  std::vector<MessageReport> recvs;
  std::vector<WorkerId> known;
  std::vector<PassReport> passes;
  std::uint64_t gradients = 0;
  CONVOY_FIELDS(there, worker, sends, recvs, known, passes, gradients)
};

}  // namespace convoy::autograd::detail
