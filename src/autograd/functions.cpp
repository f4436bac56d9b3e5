#include "autograd/functions.h"

#include "autograd/coordinator.h"
#include "autograd/registry.h"
#include "base/error.h"

namespace convoy::autograd::detail {

namespace {

// Only the root of a pass may say this.
void require_root(const PassId& pass) {
  const agent::Worker& caller = agent::Request::current()->caller();
  if (caller.id == pass.root) return;
  fail(ErrorKind::kInvalidArgument, "autograd: ", caller.name,
       " is not the root of this backward pass");
}

}  // namespace

std::vector<Ports> expand(const PassHead& head, std::uint32_t batch,
                          const std::vector<Ports>& ports) {
  require_root(head.pass);
  const auto pass = Registry::here().find_or_make_pass(head);
  if (!pass) fail(ErrorKind::kCancelled, "autograd: this backward pass has ended");
  return pass->expand(batch, ports);
}
CONVOY_RPC(expand);

rpc::Future<GradientReply> take_gradient(const PassHead& head, std::uint64_t message,
                                         const std::vector<at::Tensor>& gradients,
                                         const PlanPart& part) {
  Registry& registry = Registry::here();
  // With discovery behind it a pass is known here, or over.
  const bool may_be_new = head.fast || head.planned;
  const auto pass = may_be_new ? registry.find_or_make_pass(head) : registry.find_pass(head.pass);
  if (!pass) {
    if (!registry.has_ended(head.pass)) {
      fail(ErrorKind::kInvalidArgument, "autograd: no worker has asked for message ", message,
           " of context ", head.context, " in this backward pass");
    }
    return Pass::nothing_for_root();
  }
  const bool from_root = agent::Request::current()->caller().id == head.pass.root;
  if (from_root && !part.sends.empty()) pass->follow_plan(part);
  return pass->take(message, gradients, from_root);
}
CONVOY_RPC(take_gradient);

void take_plan(const PassHead& head, const PlanPart& part) {
  require_root(head.pass);
  const auto pass = Registry::here().find_or_make_pass(head);
  if (pass) pass->follow_plan(part);
}
CONVOY_RPC(take_plan);

void pass_done(const PassId& pass, WorkerId worker, const std::vector<WorkerId>& engaged) {
  Registry& registry = Registry::here();
  if (worker != agent::Request::current()->caller().id) {
    fail(ErrorKind::kInvalidArgument, "autograd: worker ", worker,
         " must say itself that it is done");
  }
  for (const WorkerId other : engaged) registry.require_worker(other);
  if (const auto root = registry.coordinator(pass)) root->done(worker, engaged);
}
CONVOY_RPC(pass_done);

void pass_failed(const PassId& pass, const PassError& error) {
  if (const auto root = Registry::here().coordinator(pass)) root->failed(error);
}
CONVOY_RPC(pass_failed);

void participant_lost(const PassId& pass, WorkerId worker, const std::string& why) {
  if (const auto root = Registry::here().coordinator(pass)) root->participant_lost(worker, why);
}
CONVOY_RPC(participant_lost);

void commit(const PassHead& head) {
  require_root(head.pass);
  Registry& registry = Registry::here();
  const auto pass = registry.find_pass(head.pass);
  if (!pass) return;
  // In this order: until then whoever wants the gradients waits for them.
  try {
    pass->commit();
  } catch (...) {
    registry.end_pass(head.pass);
    throw;
  }
  registry.end_pass(head.pass);
}
CONVOY_RPC(commit);

AbortReply abort_pass(const PassHead& head, const std::string& why) {
  require_root(head.pass);
  Registry& registry = Registry::here();
  auto pass = registry.find_pass(head.pass);
  if (!pass) pass = registry.end_pass(head.pass);  // none is made from here on
  if (!pass) return registry.abort_reply(head.pass);
  AbortReply reply = pass->abort(why);
  // It is asked again if this takes its time: the pass stays until then.
  if (reply.stepped == Stepped::kIsBeing) reply.stepped = pass->stepped();
  registry.keep_abort_reply(head.pass, reply);
  registry.end_pass(head.pass);
  return reply;
}
CONVOY_RPC(abort_pass);

void release_context(ContextId context, std::uint64_t floor) {
  agent::Request& request = *agent::Request::current();
  Registry::here().release(context, floor, request.caller().id);
}
CONVOY_RPC(release_context);

bool context_lives(ContextId context, WorkerId who) {
  Registry& registry = Registry::here();
  registry.require_worker(who);
  const auto found = registry.find(context);
  return found && found->know(who);
}
CONVOY_RPC(context_lives);

ContextReport report_context(ContextId context) {
  Registry& registry = Registry::here();
  const auto found = registry.find(context);
  ContextReport report = found ? found->report() : ContextReport();
  report.worker = registry.self();
  for (const auto& pass : registry.passes_of(context)) report.passes.push_back(pass->report());
  return report;
}
CONVOY_RPC(report_context);

}  // namespace convoy::autograd::detail
