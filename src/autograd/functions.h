#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "autograd/wire.h"

// What workers call of each other for contexts and backward passes. All of them may be called
// twice.
namespace convoy::autograd::detail {

// Gradients will come for these tensors of messages that this worker sent: what of other messages
// do they lead to? The batch is the root's number of the question.
std::vector<Ports> expand(const PassHead& head, std::uint32_t batch,
                          const std::vector<Ports>& ports);
// Gradients of a message's tensors. The answer to the root comes when this worker has something for
// it, and waits or is done; that to others at once.
// From the root of a pass that is planned: with this worker's part of it.
rpc::Future<GradientReply> take_gradient(const PassHead& head, std::uint64_t message,
                                         const std::vector<at::Tensor>& gradients,
                                         const PlanPart& part);
// That part alone.
void take_plan(const PassHead& head, const PlanPart& part);
// To the root: all that was to be run there has run; gradients went to these workers.
void pass_done(const PassId& pass, WorkerId worker, const std::vector<WorkerId>& engaged);
void pass_failed(const PassId& pass, const PassError& error);
// Somebody to whom gradients went is gone.
void participant_lost(const PassId& pass, WorkerId worker, const std::string& why);
// By the root: what was computed counts, or does not.
void commit(const PassHead& head);
AbortReply abort_pass(const PassHead& head, const std::string& why);

void release_context(ContextId context, std::uint64_t floor);
// To its creator, by a worker that has it.
bool context_lives(ContextId context, WorkerId who);
ContextReport report_context(ContextId context);

}  // namespace convoy::autograd::detail
