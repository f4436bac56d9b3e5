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
  std::uint64_t remaining = 0;  // nanoseconds until its deadline; kNoLimit
  CONVOY_FIELDS(pass, floor, context, fast, retain, remaining)
};
inline constexpr std::uint64_t kNoLimit = UINT64_MAX;

// Tensors of a message that gradients will come for.
struct Ports {
  WorkerId sender = 0;  // who sent the message when it was recorded
  std::uint64_t message = 0;
  std::vector<std::uint32_t> tensors;
  CONVOY_FIELDS(sender, message, tensors)
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

struct AbortReply {
  std::string waits_for;          // empty: for nothing
  std::vector<WorkerId> engaged;  // to whom it has sent gradients
  CONVOY_FIELDS(waits_for, engaged)
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
